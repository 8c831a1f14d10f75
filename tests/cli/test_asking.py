"""`furlong tail`, `query` and `alerts` on a service that lives, restarts, and is gone."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from furlong.asking.store import SCHEMA_VERSION
from furlong.config import RunConfig, to_toml
from furlong.rundir import RunDir
from tests.cli.test_main import furlong, loaded_by
from tests.metrics.asking import post
from tests.metrics.running import MetricsProcess, until

Make = Callable[..., MetricsProcess]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[[], MetricsProcess]]:
    made: list[MetricsProcess] = []

    def make_one() -> MetricsProcess:
        made.append(MetricsProcess(tmp_path))
        return made[-1]

    yield make_one
    for service in made:
        service.end()


class Tail:
    """`furlong tail` with its stdout in a file."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.output, self.errors = folder / "tail.out", folder / "tail.err"
        with self.output.open("wb") as output, self.errors.open("wb") as errors:
            command = [sys.executable, "-m", "furlong", "tail", "--json", *arguments]
            self.process = subprocess.Popen(command, stdout=output, stderr=errors)

    def numbers(self) -> list[Any]:
        trees = [json.loads(line) for line in self.output.read_text().splitlines()]
        return [tree.get("number", tree.get("step")) for tree in trees]

    def wait(self, last: int) -> None:
        until(lambda: last in self.numbers(), f"{last} in {self.numbers()}, {self.errors.read_text()}")

    def end(self, number: int = signal.SIGINT) -> int:
        self.process.send_signal(number)
        return self.process.wait(20)


def say(service: MetricsProcess, *nums: int, **fields: object) -> None:
    lines = [json.dumps({"event": "e", "run": "r", "number": n, **fields}).encode() for n in nums]
    assert post(service.http, b"\n".join(lines))["taken"] == len(nums)


def row(service: MetricsProcess, step: int, **values: float) -> None:
    record = {"event": "metrics", "run": "r", "axis": "train/step", "step": step}
    post(
        service.http,
        json.dumps({**record, "values": {f"train/{key}": value for key, value in values.items()}}).encode(),
    )


def test_tail_bridges_kills_of_the_service_without_a_doubled_or_lost_line(
    make: Callable[[], MetricsProcess], tmp_path: Path
) -> None:
    service = make().start()
    say(service, 1, 2)
    tail = Tail(tmp_path, "--run-dir", str(service.run_dir.root), "--text", '"number"')
    tail.wait(2)
    for begin in (10, 20, 30):
        say(service, *range(begin, begin + 5))
        service.kill()
        service.start()  # on another port
        say(service, *range(begin + 5, begin + 10))
        tail.wait(begin + 9)
    assert tail.numbers() == [1, 2, *range(10, 40)]
    assert tail.end() == 130
    assert "Traceback" not in tail.errors.read_text() and "KeyboardInterrupt" not in tail.errors.read_text()


def test_tail_shows_rows_and_lines_in_order_of_time(make: Callable[[], MetricsProcess], tmp_path: Path) -> None:
    service = make().start()
    post(service.http, b"\n".join(
        json.dumps({"event": "e", "run": "r", "number": n, "ts": f"2026-11-29T10:00:0{n}Z"}).encode() for n in (3, 1, 2)
    ))  # fmt: skip
    row(service, 7, loss=1)
    until(service.rows, "the row")
    tail = furlong("tail", "--json", "--no-follow", "--run-dir", str(service.run_dir.root), "--run", "r")
    trees = [json.loads(line) for line in tail.stdout.splitlines()]
    assert [tree["number"] for tree in trees if "number" in tree] == [1, 2, 3]
    assert [tree["step"] for tree in trees if "step" in tree] == [7]


def test_last_lines_of_a_service_that_is_gone_are_shown(make: Callable[[], MetricsProcess], tmp_path: Path) -> None:
    service = make().start()
    say(service, 1)
    tail = Tail(tmp_path, "--run-dir", str(service.run_dir.root), "--text", '"number"')
    tail.wait(1)
    tail.process.send_signal(signal.SIGSTOP)
    say(service, 2, 3)  # while nobody reads
    service.kill()
    (service.run_dir.root / "up.json").write_text("{}")  # `furlong up` was here, and is gone
    tail.process.send_signal(signal.SIGCONT)
    assert tail.process.wait(30) == 0
    assert tail.numbers() == [1, 2, 3] and "ended" in tail.errors.read_text()


def test_dead_run_is_read_from_what_it_stored(make: Callable[[], MetricsProcess]) -> None:
    service = make().start()
    say(service, 1, 2, level="error")
    for step in range(3):
        row(service, step, loss=step / 2, lr=1e-6)
    until(lambda: len(service.rows()) == 3, "the rows")
    service.kill()
    folder = str(service.run_dir.root)
    done = furlong("tail", "--run-dir", folder, "--level", "error", "--json", "--logs")
    assert [json.loads(line)["number"] for line in done.stdout.splitlines()] == [1, 2]
    assert done.returncode == 0 and "no metrics service runs" in done.stderr
    done = furlong("query", "train/l*", "--run-dir", folder, "--last", "2")
    assert (
        done.stdout
        == "train/step  train/loss  train/lr\n         1         0.5     1e-06\n         2           1     1e-06\n"
    )
    assert furlong("alerts", "--run-dir", folder).stdout == "nothing has fired\n"


def test_table_has_the_newest_steps_of_all_keys(make: Callable[[], MetricsProcess]) -> None:
    service = make().start()
    for step in range(6):
        row(service, step, loss=step, **({"rare": step} if step in (1, 5) else {}))
    until(lambda: len(service.rows()) == 6, "the rows")
    shown = furlong("query", "train/loss", "train/rare", "--url", service.http, "--last", "2").stdout
    assert [line.split() for line in shown.splitlines()[1:]] == [["4", "4", "-"], ["5", "5", "5"]]


def test_no_key_yet_is_said(make: Callable[[], MetricsProcess]) -> None:
    done = furlong("query", "--url", make().start().http)
    assert (done.returncode, done.stdout) == (0, "") and "no key yet" in done.stderr


def test_query_names_the_closest_keys(make: Callable[[], MetricsProcess]) -> None:
    service = make().start()
    row(service, 0, loss=1)
    until(service.rows, "the row")
    done = furlong("query", "train/los", "--url", service.http)
    assert (done.returncode, done.stdout) == (2, "") and "Did you mean train/loss?" in done.stderr
    assert furlong("query", "--url", service.http).stdout == "train/loss\n"
    done = furlong("query", "train/loss", "--url", service.http, "--json")
    assert json.loads(done.stdout)["values"] == [1]


def test_histograms_and_tables_are_shown_by_their_keys(make: Callable[[], MetricsProcess]) -> None:
    service = make().start()
    for step in range(2):
        values = {
            "train/h": ["histogram", [0, 1, 2, 4], [0, 3, step]],
            "train/t": ["table", ["who", "score"], [["a\x1b[1m", step]] + [["b", None]] * 30],
            "train/loss": 1,
        }
        record = {"event": "metrics", "run": "r", "axis": "train/step", "step": step, "values": values}
        post(service.http, json.dumps(record).encode())
    until(lambda: len(service.rows()) == 2, "the rows")
    where = ("--url", service.http)
    assert furlong("query", *where).stdout.split() == ["train/h", "train/loss", "train/t"]
    lines = furlong("query", "train/h", *where).stdout.splitlines()
    assert lines[0].startswith("train/h, a histogram")
    assert [line.split() for line in lines[2:]] == [["0", "3", "1", "2", "1.5"], ["1", "4", "1", "4", "1.875"]]
    table = furlong("query", "train/t", *where).stdout
    assert (
        table.startswith("train/t, a table, at train/step 1\n") and "and 11 rows more" in table and "\x1b" not in table
    )
    assert "histograms: train/h tables: train/t" in furlong("tail", "--no-follow", *where).stdout
    service.kill()
    done = furlong("query", "train/[ht]", "--json", "--run-dir", str(service.run_dir.root))
    histogram, whole = (json.loads(line) for line in done.stdout.splitlines())
    assert (histogram["kind"], histogram["steps"]) == ("histogram", [0, 1])
    assert histogram["values"][1] == {"edges": [0, 1, 2, 4], "counts": [0, 3, 1]}
    assert len(whole["values"][1]["rows"]) == 31


def test_alerts_are_listed(make: Callable[[], MetricsProcess]) -> None:
    service = make().start()
    say(service, 1)
    service.kill()
    with sqlite3.connect(service.run_dir.metrics_store / "metrics.db") as store:
        (run_id,) = store.execute("SELECT id FROM runs WHERE name = 'r'").fetchone()
        for at, (rule, state) in enumerate([("a", "firing"), ("b", "firing"), ("a", "resolved")]):
            body = json.dumps({"summary": f"{rule} is odd.", "remedy": "Look.", "severity": "warning"})
            insert = "INSERT INTO alerts (run_id, rule, state, at_us, body) VALUES (?, ?, ?, ?, ?)"
            store.execute(insert, (run_id, rule, state, at * 1_000_000, body))
    folder = str(service.run_dir.root)
    lines = furlong("alerts", "--run-dir", folder).stdout.splitlines()
    assert len(lines) == 3 and "FIRING   a: a is odd. Look." in lines[0] and "RESOLVED a" in lines[2]
    done = furlong("alerts", "--run-dir", folder, "--firing", "--json")
    assert [json.loads(line)["rule"] for line in done.stdout.splitlines()] == ["b"]


@pytest.mark.parametrize("command", ["tail", "query", "alerts"])
def test_damaged_store_is_told_with_what_to_do(command: str, tmp_path: Path) -> None:
    folder = RunDir(tmp_path).create().metrics_store
    with sqlite3.connect(folder / "metrics.db") as store:
        store.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        for table, columns in (("runs", "id, name, last_us"), ("alerts", "id, run_id, rule, state, at_us, body")):
            store.execute(f"CREATE TABLE {table} ({columns})")
        store.execute("INSERT INTO runs VALUES (1, 'r', 0)")
        store.execute("INSERT INTO alerts VALUES (1, 1, 'a', 'firing', 0, '{\"summ')")  # half a page
    done = furlong(command, "--run-dir", str(tmp_path))
    assert done.returncode == 2 and "Start the metrics service on it once" in done.stderr
    assert "Traceback" not in done.stderr


def test_reader_that_has_enough_ends_tail(make: Callable[[], MetricsProcess]) -> None:
    service = make().start()
    say(service, 1)
    command = [sys.executable, "-m", "furlong", "tail", "--url", service.http]
    tail = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert tail.stdout is not None and tail.stdout.readline()
    tail.stdout.close()  # nothing comes any more, and it ends all the same
    assert tail.wait(10) == 0
    assert tail.stderr is not None and tail.stderr.read() == b""


def test_run_with_a_shared_service_is_found_through_it(make: Callable[[], MetricsProcess], tmp_path: Path) -> None:
    service = make().start()
    say(service, 1)
    post(service.http, b'{"event": "e", "run": "other", "number": 2}')
    other = RunDir(tmp_path / "other").create()
    config = RunConfig().model_copy(
        update={
            "run": RunConfig().run.model_copy(update={"name": "other"}),
            "metrics": RunConfig().metrics.model_copy(update={"metrics_addr": service.address}),
        }
    )
    other.config.write_text(to_toml(config))
    done = furlong("tail", "--run-dir", str(other.root), "--no-follow", "--json")
    assert [json.loads(line)["number"] for line in done.stdout.splitlines()] == [2]


@pytest.mark.parametrize("command", ["tail", "query", "alerts"])
def test_help_is_worth_reading(command: str) -> None:
    done = furlong(command, "--help")
    assert done.returncode == 0 and "--run-dir DIR" in done.stdout and "Exits 0" in done.stdout


@pytest.mark.parametrize("command", ["tail", "query", "alerts"])
@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ([], 2, "--run-dir"),
        (["--url", "http://127.0.0.1:1"], 5, "cannot be reached"),
        (["--url", "gopher://x"], 2, "http://HOST:PORT"),
        (["--run-dir", "nowhere"], 2, "must be a folder"),
        (["--run-dir", "."], 2, "is not there"),
        (["--run-dir", ".", "--url", "http://127.0.0.1:1"], 2, "exactly one"),
        (["--url", "http://127.0.0.1:1", "--rnu", "x"], 2, "Did you mean --run?"),
        (["--url", "http://127.0.0.1:1", "--last", "x"], 2, "whole number"),
    ],
)
def test_what_makes_no_sense_is_told(command: str, arguments: list[str], code: int, said: str, tmp_path: Path) -> None:
    done = furlong(command, *arguments, cwd=tmp_path)
    assert done.returncode == code and said in done.stderr and "Traceback" not in done.stderr


def test_they_start_without_what_is_heavy() -> None:
    heavy = ("torch", "grpc", "tyro", "fastapi", "wandb", "aiohttp")
    assert loaded_by("tail", "--url", "http://127.0.0.1:1", "--no-follow", among=heavy) == "[]"


def test_colours_only_on_a_terminal(make: Callable[[], MetricsProcess]) -> None:
    service = make().start()
    say(service, 1)
    command = [sys.executable, "-m", "furlong", "tail", "--url", service.http, "--no-follow"]
    assert b"\x1b" not in subprocess.run(command, capture_output=True, timeout=30, check=True).stdout
    main_end, terminal = os.openpty()
    subprocess.run(command, stdout=terminal, timeout=30, check=True)
    os.set_blocking(main_end, False)
    shown = b""
    deadline = time.monotonic() + 5
    while b"\x1b[" not in shown and time.monotonic() < deadline:
        shown += os.read(main_end, 65536)
    assert b"\x1b[" in shown
