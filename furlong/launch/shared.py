"""What a metrics service that several runs share says of this one. Every question is over within its limit."""

import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from furlong.asking.client import MetricsClient, Refused, Unreachable
from furlong.asking.source import http_of
from furlong.launch.rows import Row

LIMIT_S = 3.0
REWARD, TIME = "rollout/raw_reward", "perf/step_time"
Result = TypeVar("Result")


class NotAnswered(Exception):
    """The service did not say."""


def last_row(address: str, run: str) -> Row | None:
    """The newest row of the axis rollout/step, if there is one. Raises NotAnswered."""

    def ask() -> Row | None:
        params = {"run": run, "axis": "rollout/step", "last": 1}
        found = MetricsClient(http_of(address)).get("/api/rows", params)["rows"]
        return Row(found[-1]["axis"], found[-1]["step"], found[-1]["attempt"], found[-1]["values"]) if found else None

    return _within(ask)


def results(address: str, run: str) -> list[Row]:
    """Rewards, evaluations and how far the run is: rows with these values alone, by step. Raises NotAnswered."""

    def ask() -> list[Row]:
        client = MetricsClient(http_of(address))
        series = client.get("/api/series", {"run": run})["series"]
        keys = [item["key"] for item in series if item["key"] in (REWARD, TIME) or item["axis"] == "eval/step"]
        if not keys:
            return []
        curves = client.get("/api/points", {"run": run, "key": keys[:100]})["curves"]
        return _rows(curves)

    return _within(ask)


def _rows(curves: list[dict[str, Any]]) -> list[Row]:  # Any: JSON
    rows: dict[tuple[str, int], Row] = {}
    for curve in curves:
        for step, attempt, value in zip(curve["steps"], curve["attempts"], curve["values"], strict=True):
            row = rows.setdefault((curve["axis"], step), Row(curve["axis"], step, attempt, {}))
            row.values[curve["key"]] = value
    return [rows[place] for place in sorted(rows)]


def _within(ask: Callable[[], Result]) -> Result:
    """In a thread that is left behind when it takes too long: no answer is worth a wait without end."""
    answers: queue.SimpleQueue[tuple[Result | None, str]] = queue.SimpleQueue()

    def work() -> None:
        try:
            answers.put((ask(), ""))
        except (Unreachable, Refused) as error:
            answers.put((None, str(error)))
        except Exception as error:  # whatever another version of the service answers
            answers.put((None, f"its answer is not understood: {error!r}"))

    threading.Thread(target=work, name="ask-shared", daemon=True).start()
    try:
        answer, why_not = answers.get(timeout=LIMIT_S)
    except queue.Empty:
        raise NotAnswered(f"no answer within {LIMIT_S:g} s") from None
    if why_not:
        raise NotAnswered(why_not)
    return answer  # type: ignore[return-value]  # it is the answer, which may be None
