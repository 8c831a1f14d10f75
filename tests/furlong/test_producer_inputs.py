"""What callers hand over: numbers of every library, no numbers, too many names, too long lines, many writers."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
import torch

from furlong import logs
from furlong.linefile import open_appending
from furlong.records import Histogram, Last, Mean, Table, Value, histogram_of
from furlong.telemetry import Telemetry
from tests.furlong.fake_metrics import FakeMetrics
from tests.metrics.running import until


@pytest.fixture
def service() -> Iterator[FakeMetrics]:
    fake = FakeMetrics()
    yield fake
    fake.close()


@pytest.fixture
def telemetry(service: FakeMetrics, tmp_path: Path) -> Iterator[Telemetry]:
    made = Telemetry(run="r", service="s", instance="x-0", find_address=lambda: service.address, spool_folder=tmp_path)
    logs.configure(run="r", service="s", instance="x-0", path=tmp_path / "log", telemetry=made)
    yield made
    made.close(5.0)
    logs.configure(run="r", service="s", instance="x-0", path=None, telemetry=None)


def send(telemetry: Telemetry, values: dict[Any, Any], *, step: int = 1) -> None:
    telemetry.metrics("train/step", step, values, part="t", parts=["t"])


def values_sent(service: FakeMetrics, telemetry: Telemetry) -> dict[str, Any]:
    assert telemetry.flush(20.0)
    return {name: value for record in service.said("metrics") for name, value in record["values"].items()}


SCALARS: dict[str, Any] = {
    "a": np.float32(1),
    "b": np.int64(2),
    "c": np.bool_(True),
    "d": torch.tensor(0.5, dtype=torch.bfloat16),
    "nan": np.float32("nan"),
    "huge": 2**70,
    "exact": np.int64(2**53 + 1),
    "exact_tensor": torch.tensor(2**53 + 1),
    "plain": 3,
}
NUMBERS = {"a": 1.0, "b": 2.0, "c": 1.0, "d": 0.5, "nan": "NaN", "huge": float(2**70), "plain": 3}
NUMBERS |= {"exact": 2**53 + 1, "exact_tensor": 2**53 + 1}
COUNT: Any = np.int64(2)
NO_NUMBERS: dict[str, Any] = {"e": [1, 2], "f": None, "g": "x", "h": np.ones(2), "i": torch.ones(2, 2), "j": object()}


def test_scalars_of_every_library_are_numbers_with_a_kind_and_without(
    service: FakeMetrics, telemetry: Telemetry
) -> None:
    send(telemetry, {f"last/{name}": Last(value) for name, value in SCALARS.items()})
    send(telemetry, {f"mean/{name}": Mean(value, COUNT) for name, value in SCALARS.items()})
    send(telemetry, {f"raw/{name}": value for name, value in SCALARS.items()})
    expected = {
        **{f"last/{name}": ["last", number] for name, number in NUMBERS.items()},
        **{f"mean/{name}": ["mean", number, 2.0] for name, number in NUMBERS.items()},
        **{f"raw/{name}": ["last", number] for name, number in NUMBERS.items()},
    }
    assert values_sent(service, telemetry) == expected


def test_what_is_no_number_is_left_out_with_one_warning_each(service: FakeMetrics, telemetry: Telemetry) -> None:
    for step in range(3):
        send(telemetry, {**NO_NUMBERS, "good": 1.5}, step=step)
        send(telemetry, {f"last/{name}": Last(value) for name, value in NO_NUMBERS.items()}, step=step)
    assert values_sent(service, telemetry) == {"good": ["last", 1.5]}
    assert len(service.said("metrics")) == 6  # also empty: the row waits for its parts
    warned = sorted(record["what"] for record in service.said("telemetry_cannot_send"))
    assert warned == sorted(f"value_not_sent {prefix}{name}" for prefix in ("", "last/") for name in NO_NUMBERS)


def test_value_whose_own_code_raises_costs_only_itself(service: FakeMetrics, telemetry: Telemetry) -> None:
    class Raises:
        def __float__(self) -> float:
            raise RuntimeError("no")

    send(telemetry, {"bad": Raises(), "last": Last(Raises()), "good": 1})  # type: ignore[arg-type]
    assert values_sent(service, telemetry) == {"good": ["last", 1]}


def test_names_that_are_no_text_are_made_text(service: FakeMetrics, telemetry: Telemetry) -> None:
    send(telemetry, {"a\ud800": Last(1.0), 5: Last(2.0), "ok": Last(3.0)})
    assert values_sent(service, telemetry) == {"a?": ["last", 1.0], "5": ["last", 2.0], "ok": ["last", 3.0]}


def test_distributions_and_tables_are_sent_as_they_are(service: FakeMetrics, telemetry: Telemetry) -> None:
    table = Table(("prompt", "reward"), (("2+2", 1.0),))
    send(telemetry, {"h": histogram_of([0.0, 1.0], 2), "t": table, "np": Histogram(np.array([0, 1]), np.array([7]))})  # type: ignore[arg-type]
    assert values_sent(service, telemetry) == {
        "h": ["histogram", [0.0, 0.5, 1.0], [1, 1]],
        "t": ["table", ["prompt", "reward"], [["2+2", 1.0]]],
        "np": ["histogram", [0, 1], [7]],
    }


def test_few_records_are_delivered_at_once_though_nothing_follows(service: FakeMetrics, telemetry: Telemetry) -> None:
    telemetry.record({"event": "earlier"})
    assert telemetry.flush(20.0)  # it is connected, and would wait for more
    for number in range(3):
        telemetry.record({"event": "few", "n": number})
    until(lambda: len(service.said("few")) == 3, "three records", limit_s=3.0)


def test_row_of_more_names_than_a_message_holds_is_sent_in_parts(service: FakeMetrics, telemetry: Telemetry) -> None:
    values: dict[str, Value] = {f"perf/{'long' * 30}_{number}": Last(float(number)) for number in range(60_000)}
    send(telemetry, values)  # 8.6 MB
    assert len(values_sent(service, telemetry)) == 60_000
    assert len(service.said("metrics")) > 1


def test_line_or_name_that_is_too_large_is_told_and_the_rest_delivered(
    service: FakeMetrics, telemetry: Telemetry
) -> None:
    structlog.get_logger().info("long", text="y" * 5 * 1024 * 1024)
    telemetry.ship(b'{"event":"raw","text":"' + b"y" * 5 * 1024 * 1024 + b'"}', 20)
    telemetry.record({"event": "mine", "text": "y" * 5 * 1024 * 1024})
    send(telemetry, {"n" * 5 * 1024 * 1024: Last(1.0), "good": Last(2.0)})
    assert values_sent(service, telemetry) == {"good": ["last", 2.0]}
    assert "more characters" in service.said("long")[0]["text"] and service.said("mine")
    assert len(service.said("telemetry_cannot_send")) == 2 and not service.said("raw")
    assert telemetry.stats.num_refused == 0


def test_exception_with_a_value_that_cannot_be_shown_is_one_entry_of_each_output(
    telemetry: Telemetry, tmp_path: Path
) -> None:
    program = """
import sys, structlog
from pathlib import Path
from furlong import logs
class Bad:
    def __repr__(self):
        raise RuntimeError("no")
logs.configure(run="r", service="s", instance="i", path=Path(sys.argv[1]), to_stderr=True, telemetry=None)
structlog.get_logger().exception("failed", value=Bad(), exc_info=ValueError("why"))
"""
    command = [sys.executable, "-c", program, str(tmp_path / "both")]
    done = subprocess.run(command, capture_output=True, timeout=30, check=True)
    (entry,) = (tmp_path / "both").read_bytes().splitlines()
    assert done.stderr.splitlines() == [entry]
    assert "ValueError: why" in json.loads(entry)["exception"]


def test_long_lines_of_several_processes_are_not_welded(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    children = []
    for writer in range(8):
        child = os.fork()
        if child == 0:
            file = open_appending(path)
            for number in range(40):
                file.write_line(b'{"writer":%d,"number":%d,"text":"%s"}' % (writer, number, b"x" * 200_000))
            os._exit(0 if file.num_lost == 0 else 1)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 8
    lines = filter(None, path.read_bytes().split(b"\n"))  # one who comes while another writes may begin a line anew
    seen = [(entry["writer"], entry["number"]) for entry in map(json.loads, lines)]
    assert sorted(seen) == [(writer, number) for writer in range(8) for number in range(40)]
