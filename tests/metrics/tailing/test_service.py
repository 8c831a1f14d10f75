"""The real service follows real files: killed, restarted, flooded; each line is in the store once."""

import itertools
import json
import os
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from furlong.config import RunConfig
from furlong.process import ExitCode
from furlong.rundir import RunDir
from services.metrics.tailing.part import files_to_follow
from tests.metrics.running import MetricsProcess, batch, send, until

Make = Callable[..., MetricsProcess]
RECORDED = Path(__file__).parents[1] / "engines/sglang_0_5_23.log"


def ask(service: MetricsProcess, what: str) -> list[Any]:
    """Of the batches of followed files, as they are on disk."""
    path = service.run_dir.metrics_store / "metrics.db"
    connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    try:
        find = f"SELECT {what} FROM batches b JOIN producers p ON p.id = producer_id WHERE producer = 'r/tail'"
        return [value for (value,) in connection.execute(find)]
    finally:
        connection.close()


def stored(service: MetricsProcess) -> list[dict[str, Any]]:
    """The records of followed files."""
    return [json.loads(line) for body in ask(service, "body") for line in bytes(body).split(b"\n") if line]


def texts(service: MetricsProcess) -> list[str]:
    return [record["text"] for record in stored(service) if record.get("event") == "line"]


def wait_texts(service: MetricsProcess, count: int) -> list[str]:
    until(lambda: sum(ask(service, "num_records")) >= count, f"{count} lines in the store")
    return texts(service)


def rotate(log: Path) -> None:
    """Every file one number on, as logrotate does."""
    last = len(list(log.parent.glob(f"{log.name}.*")))
    for number in range(last, 0, -1):
        os.rename(f"{log}.{number}", f"{log}.{number + 1}")
    log.rename(f"{log}.1")


@pytest.mark.parametrize("num_kills", [2, pytest.param(12, marks=pytest.mark.slow)])
def test_killed_again_and_again_while_a_log_is_written_and_rotated_each_line_comes_once(
    make: Make, tmp_path: Path, num_kills: int
) -> None:
    log = tmp_path / "app.log"
    service = make(tail=[f"{log}*"]).start()
    number, ended = itertools.count(), threading.Event()

    def write() -> None:
        while not ended.is_set():
            with log.open("a") as file:
                for _ in range(200):
                    file.write(f"line {next(number)}\n")
            if log.stat().st_size > 20_000:
                rotate(log)
            ended.wait(0.1)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for kill in range(num_kills):
            wait_texts(service, 500 * (kill + 1))
            service.kill()
            service.start()
    finally:
        ended.set()
        writer.join(10)
    total = next(number)
    found = wait_texts(service, total)
    assert sorted(found) == sorted(f"line {n}" for n in range(total))
    assert service.stop() == ExitCode.DRAINED


def test_lines_of_a_file_that_falls_silent_are_stored_at_once(make: Make, tmp_path: Path) -> None:
    log = tmp_path / "app.log"
    log.touch()
    service = make(tail=[str(log)]).start()
    began = time.monotonic()
    log.write_text("1\n2\n3\n")
    assert wait_texts(service, 3) == ["1", "2", "3"]
    assert time.monotonic() - began < 2.0


def test_last_line_of_a_program_is_stored_also_without_its_end(make: Make, tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    service = make(tail=[str(log)]).start()
    program = "import sys; print('A', flush=True); sys.stdin.readline(); print('B', end='')"
    with log.open("wb") as output:
        process = subprocess.Popen([sys.executable, "-c", program], stdout=output, stdin=subprocess.PIPE)
        assert wait_texts(service, 1) == ["A"]
        process.communicate(b"\n", timeout=20)
    assert service.stop() == ExitCode.DRAINED
    assert texts(service) == ["A", "B"]
    service.start()
    with log.open("a") as file:
        file.write("\nC\n")
    assert wait_texts(service, 3) == ["A", "B", "C"]


def test_cut_and_replaced_file_of_two_megabytes_goes_on(make: Make, tmp_path: Path) -> None:
    log = tmp_path / "app.log"
    log.write_text("".join(f"{n:>99}\n" for n in range(20_000)))
    service = make(tail=[str(log)]).start()
    wait_texts(service, 20_000)
    os.truncate(log, 0)
    with log.open("a") as file:
        file.write("".join(f"after {n}\n" for n in range(10)))
    assert wait_texts(service, 20_010)[-10:] == [f"after {n}" for n in range(10)]
    (scratch := tmp_path / "scratch").write_text("replaced\n")
    scratch.replace(log)
    assert wait_texts(service, 20_011)[-1] == "replaced"


def test_json_lines_and_metrics_of_others_are_records_and_rows(make: Make, tmp_path: Path) -> None:
    log = tmp_path / "job.jsonl"
    log.write_bytes(
        b'{"event":"started","n":1}{"event":"welded"}\nraw \xff byte\n'
        b'{"event":"metrics","axis":"train/step","step":4,"values":{"train/loss":0.25}}\n'
    )
    service = make(tail=[str(log)]).start()
    assert service.wait_row(4)["values"] == {"train/loss": 0.25}
    events = [(record["event"], record["run"], record["file"]) for record in stored(service)]
    assert events == [(event, "r", str(log)) for event in ("started", "welded", "line", "metrics")]
    assert texts(service) == ["raw \ufffd byte"]
    (file,) = service.status().files
    assert (file.num_lines, file.num_records, file.num_welded, file.num_invalid) == (3, 4, 1, 1)


def test_recorded_output_of_sglang_makes_lines_and_rows(make: Make, tmp_path: Path) -> None:
    log = tmp_path / "engine-0.out"
    log.write_bytes(RECORDED.read_bytes())
    service = make(tail=[str(log)], scrape_interval_s=1.0).start()
    rows = service.wait_rows(2)
    assert {row["axis"] for row in rows} == {"engine/time"}
    assert sum(row["values"]["engine/engine-0/new_seqs"] for row in rows) == 9
    assert sum(row["values"]["engine/engine-0/num_decode_batches"] for row in rows) == 23
    lines = [record for record in stored(service) if record["event"] == "line"]
    assert lines[-1]["service"] == "engine"
    assert lines[-1]["text"].endswith("kill_process_tree called: parent_pid=3459, include_parent=True, pid=3459")
    bars = [record["text"] for record in lines if "loading shards" in record["text"]]
    assert len(bars) == 1
    assert "100% Completed" in bars[0]
    assert "  0% Completed" not in bars[0]


def test_row_of_an_interval_is_whole_also_when_the_service_is_killed_in_it(make: Make, tmp_path: Path) -> None:
    log = tmp_path / "engine-0.out"
    stamp = time.strftime("[%Y-%m-%d %H:%M:%S]", time.localtime(time.time() // 2 * 2))
    line = f"{stamp} Decode batch, #running-req: 3, #token: 9, gen throughput (token/s): {{}}, #queue-req: 0\n"
    log.write_text(line.format(100))
    service = make(tail=[str(log)], scrape_interval_s=2.0).start()
    wait_texts(service, 1)
    service.kill()
    with log.open("a") as file:
        file.write(line.format(300))
    service.start()
    until(
        lambda: any(row["values"]["engine/engine-0/num_decode_batches"] == 2 for row in service.rows()), "a row of both"
    )
    assert service.rows()[-1]["values"]["engine/engine-0/gen_throughput"] == 200.0


def test_endpoint_is_read_into_rows_and_a_dead_one_is_told(make: Make) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"# TYPE sglang:token_usage gauge\nsglang:token_usage 0.25\n")

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"engine-7=http://127.0.0.1:{server.server_port}"
        service = make(scrape=[url, "dead=http://127.0.0.1:9"], scrape_interval_s=1.0).start()
        assert service.wait_rows(1)[0]["values"] == {"engine/engine-7/token_usage": 0.25}
        until(lambda: len(service.status().endpoints) == 2 and service.status().endpoints[1].num_failures, "a failure")
        server.shutdown()
    assert service.stop() == ExitCode.DRAINED
    log = [json.loads(line) for line in service.run_dir.log("metrics").read_text().splitlines()]
    failed = [entry["endpoint"] for entry in log if entry["event"] == "scrape_failed"]
    assert failed.count("dead") == 1


def test_flood_does_not_hold_up_producers(make: Make, tmp_path: Path) -> None:
    log = tmp_path / "flood.log"
    log.write_bytes(b"".join(b"%099d\n" % n for n in range(400_000)))
    service = make(tail=[str(log)]).start()
    until(lambda: service.status().files, "the flood begun")
    slowest = 0.0
    for number in range(1, 40):
        began = time.monotonic()
        send(service, batch([b'{"event":"x"}'] * 64, first=(number - 1) * 64 + 1))
        slowest = max(slowest, time.monotonic() - began)
    behind = service.status().files[0].behind_bytes
    assert behind > 0, "the flood had ended before"
    assert slowest < 2.0


def test_folder_is_refused_at_the_start(tmp_path: Path) -> None:
    service = MetricsProcess(tmp_path, tail=[str(tmp_path)])
    command = [sys.executable, "-m", "tests.metrics.serve", str(tmp_path / "config.json")]
    ended = subprocess.run(command, capture_output=True, timeout=30, check=False)
    assert ended.returncode == ExitCode.BAD_CONFIG
    assert f"--tail '{tmp_path}/*.log'".encode() in ended.stderr
    assert service.process is None


@pytest.mark.parametrize(
    ("engine", "alone", "expected"), [("sglang", False, 1), ("cpu", False, 0), ("sglang", True, 0)]
)
def test_output_of_sglang_engines_is_followed_without_asking(
    tmp_path: Path, engine: str, alone: bool, expected: int
) -> None:
    config = RunConfig()
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"rollout_engine": engine})})
    assert len(files_to_follow(config, RunDir(tmp_path / "[run]"), alone=alone)) == expected
