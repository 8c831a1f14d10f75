"""GET /api/runs, rows, series, points, objects, logs, alerts: questions about the store, as JSON."""

import math
from collections.abc import Callable, Iterable
from typing import Annotated, TypeVar

import orjson
from fastapi import APIRouter, Depends, Query, Request, Response

from furlong.asking.filters import LogFilter
from furlong.asking.forms import line_form, row_form
from furlong.asking.levels import NAMES, level_number
from furlong.asking.objects import MAX_OBJECTS, newest_objects, objects_of
from furlong.asking.store import Curve, StoreReader, UnknownName
from furlong.clock import iso
from services.metrics.http.errors import Problem
from services.metrics.queries import LIMIT_S, Busy, NoStore, Queries, TookTooLong

MAX_ROWS = 10_000
MAX_LINES = 10_000
MAX_POINTS = 1_000_000
_ID = 2**62
Result = TypeVar("Result")

Run = Annotated[str | None, Query(description="Of this run only.", max_length=128, examples=["arith"])]
Axis = Annotated[str | None, Query(description="Of this axis only.", max_length=128, examples=["rollout/step"])]
Attempt = Annotated[int | None, Query(description="Of this attempt; not given: the newest at each step.", ge=0, le=_ID)]
After = Annotated[int | None, Query(description="What came after the one with this id, oldest first.", ge=0, le=_ID)]
Level = Annotated[str, Query(description="The lowest level; debug shows all.", examples=["warning"])]


class Asker:
    """Turns what may go wrong with a question into an answer."""

    def __init__(self, queries: Queries) -> None:
        self._queries = queries

    async def ask(self, question: Callable[[StoreReader], Result]) -> Result:
        """Raises Problem."""
        try:
            return await self._queries.ask(question)
        except UnknownName as error:
            like = f"Did you mean {', '.join(error.close)}? " if error.close else ""
            lists = "GET /api/runs lists runs." if error.what == "run" else "GET /api/series lists keys."
            raise Problem(404, str(error), like + lists, more={"close": error.close}) from None
        except TookTooLong:
            raise Problem(503, f"the answer took longer than {LIMIT_S:g} s", "Ask for less.", retry_after_s=5) from None
        except Busy:
            raise Problem(503, "too many questions wait", "Ask again later.", retry_after_s=2) from None
        except NoStore as error:
            raise Problem(503, str(error), "Ask again later.", retry_after_s=5) from None


def refuse_unknown(request: Request) -> None:
    """Raises Problem for a parameter that the address does not take: one that is misspelt would filter nothing."""
    known = [param.alias for param in request.scope["route"].dependant.query_params]
    for name in request.query_params:
        if name not in known:
            takes = f"It takes {', '.join(known)}." if known else "It takes none."
            raise Problem(400, f"{name[:100]!r} is no parameter of {request.url.path}", takes)


def router(queries: Queries) -> APIRouter:
    """The routes."""
    routes = APIRouter(prefix="/api", tags=["asking"], dependencies=[Depends(refuse_unknown)])
    asker = Asker(queries)

    @routes.get("/runs", responses=_example({"runs": [_RUN]}), summary="The runs")
    async def runs() -> Response:
        """Every run, the one that was last heard of first, with its axes and the last step of each."""
        found = await asker.ask(lambda store: store.runs())
        return _json({"runs": [_run_form(run) for run in found]})

    @routes.get("/rows", responses=_example({"rows": [_ROW]}), summary="Rows, whole")
    async def rows(
        run: Run = None,
        axis: Axis = None,
        attempt: Attempt = None,
        after: After = None,
        last: Annotated[int, Query(description="How many.", ge=1, le=MAX_ROWS)] = 100,
    ) -> Response:
        """The newest rows, oldest first, each as it is now. With `after`: every row and amendment since, in the order
        in which they were handed on.
        """
        found = await asker.ask(lambda store: store.rows(run=run, axis=axis, attempt=attempt, last=last, after=after))
        return _raw("rows", (row_form(row_id, emitted_us, body) for row_id, emitted_us, body in found))

    @routes.get("/series", responses=_example({"series": [_SERIES]}), summary="The keys that have numbers")
    async def series(run: Run = None) -> Response:
        """By run and axis."""
        return _json({"series": await asker.ask(lambda store: store.series(run))})

    @routes.get("/points", responses=_example({"curves": [_CURVE]}), summary="Curves of keys over steps")
    async def points(
        key: Annotated[list[str], Query(description="Repeat it for several.", min_length=1, examples=[["train/loss"]])],
        run: Run = None,
        attempt: Attempt = None,
        last: Annotated[int | None, Query(description="Steps, the newest.", ge=1, le=MAX_POINTS)] = None,
        max_points: Annotated[
            int | None, Query(description="Fewer points; peaks and dips are kept.", ge=5, le=MAX_POINTS)
        ] = None,
    ) -> Response:
        """One curve a key and run that has it. NaN and infinities are the strings "NaN", "Infinity", "-Infinity"."""
        if len(key) > 100:
            raise Problem(400, f"at most 100 keys at once, got {len(key)}", "Ask several times.")
        found = await asker.ask(
            lambda store: _curves(store.curves(key, run=run, last=last, attempt=attempt, max_points=max_points))
        )
        return Response(found, media_type="application/json")

    @routes.get("/objects", responses=_example({"objects": [_OBJECT]}), summary="Histograms and tables of keys")
    async def objects(
        key: Annotated[list[str] | None, Query(description="Repeat it for several.", max_length=100)] = None,
        run: Run = None,
        attempt: Attempt = None,
        last: Annotated[int, Query(description="Steps, the newest.", ge=1, le=MAX_OBJECTS)] = 20,
    ) -> Response:
        """One object a key and step, oldest first. Without a key: the newest of every key that the last rows have."""
        if key:
            found = await asker.ask(lambda store: objects_of(store, key, run=run, last=last, attempt=attempt))
        else:
            found = await asker.ask(lambda store: newest_objects(store, run=run))
        return _json({"objects": found})

    @routes.get("/logs", responses=_example({"logs": [_LINE], "complete": True, "before": 131072}), summary="Log lines")
    async def logs(
        run: Run = None,
        service: Annotated[str | None, Query(description="Of this service.", examples=["trainer"])] = None,
        instance: Annotated[str | None, Query(description="Of this instance.", examples=["engine-0"])] = None,
        level: Level = "info",
        rollout_id: Annotated[int | None, Query(description="Of this rollout.")] = None,
        text: Annotated[str | None, Query(description="Holds this, in letters of any case.", max_length=1000)] = None,
        after: After = None,
        before: Annotated[int | None, Query(description="Older than the one with this id.", ge=0, le=_ID)] = None,
        last: Annotated[int, Query(description="How many.", ge=1, le=MAX_LINES)] = 100,
    ) -> Response:
        """The newest lines that fit, oldest first. `complete` false: the scan ended at its limit; ask again with
        `before` for older ones.
        """
        wanted = LogFilter(run, service, instance, level_of(level), rollout_id, text)
        page = await asker.ask(lambda store: store.logs(wanted, last=last, after=after, before=before))
        lines = (line_form(line.record_id, line.received_us, line.body) for line in page.lines)
        return _raw("logs", lines, more={"complete": page.complete, "before": page.scanned_from})

    @routes.get("/alerts", responses=_example({"alerts": [_ALERT]}), summary="Alerts")
    async def alerts(
        run: Run = None,
        firing: Annotated[bool | None, Query(description="true: those that fire now.")] = None,
        after: After = None,
        last: Annotated[int, Query(description="How many.", ge=1, le=MAX_ROWS)] = 100,
    ) -> Response:
        """Changes of alerts, oldest first: each began or ceased to fire."""
        found = await asker.ask(lambda store: store.alerts(run=run, firing=firing, last=last, after=after))
        return _json({"alerts": found})

    return routes


def level_of(name: str) -> int:
    """A level's number. Raises Problem for what is none."""
    number = level_number(name)
    if number == level_number(None) and name.lower() not in ("info", "notice", "information", "20"):
        raise Problem(400, f"level must be one of {', '.join(NAMES.values())}, got {name[:100]!r}", "Mend it.")
    return number


def _curves(curves: Iterable[Curve]) -> bytes:
    return orjson.dumps(
        {
            "curves": [
                {
                    "run": curve.run,
                    "axis": curve.axis,
                    "key": curve.key,
                    "steps": curve.steps,
                    "attempts": curve.attempts,
                    "values": [_number(value) for value in curve.values],
                }
                for curve in curves
            ]
        }
    )


def _number(value: float | None) -> float | str:
    if value is None:
        return "NaN"
    return value if math.isfinite(value) else ("Infinity" if value > 0 else "-Infinity")


def _run_form(run: dict[str, object]) -> dict[str, object]:
    first_us, last_us = run.pop("first_us"), run.pop("last_us")
    return {**run, "first": iso(int(str(first_us))), "last": iso(int(str(last_us)))}


def _json(tree: object) -> Response:
    return Response(orjson.dumps(tree), media_type="application/json")


def _raw(name: str, items: Iterable[bytes], *, more: dict[str, object] | None = None) -> Response:
    """{name: [items]} where the items are JSON already."""
    tail = orjson.dumps(more)[1:] if more else b"}"
    whole = b'{"%s":[' % name.encode() + b",\n".join(items) + b"]" + (b"," if more else b"") + tail
    return Response(whole, media_type="application/json")


def _example(tree: object) -> dict[int | str, dict[str, object]]:
    return {200: {"content": {"application/json": {"example": tree}}}}


_WHEN = "2026-11-29T17:03:41.123456Z"
_RUN = {"run": "arith", "axes": {"rollout/step": 29, "train/step": 59}, "first": _WHEN, "last": _WHEN}
_ROW = {
    "id": 12, "emitted": _WHEN, "run": "arith", "axis": "rollout/step", "step": 11, "attempt": 1, "rollout_id": 11,
    "complete": True, "values": {"rollout/raw_reward": 0.52, "perf/step_time": 3.1},
}  # fmt: skip
_SERIES = {"run": "arith", "axis": "train/step", "key": "train/loss"}
_CURVE = {**_SERIES, "steps": [0, 1], "attempts": [1, 1], "values": [0.5, 0.25]}
_OBJECT = {
    **_SERIES, "key": "train/ratio", "kind": "histogram", "step": 1, "attempt": 1,
    "value": {"edges": [0.5, 1.0, 1.5], "counts": [12, 20]},
}  # fmt: skip
_LINE = {
    "id": 65536, "received": _WHEN,
    "record": {"ts": _WHEN, "level": "info", "event": "weights_published", "run": "arith", "service": "trainer"},
}  # fmt: skip
_ALERT = {
    "id": 3, "run": "arith", "rule": "loss_spike", "state": "firing", "at_us": 1796317421123456,
    "summary": "train/loss is 9.1 at step 40, usually 0.1 to 0.4", "remedy": "Lower --lr.",
}  # fmt: skip
