"""The service, or its producers, killed again and again in a burst: what was acknowledged is there, once."""

import collections
import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import grpc
import orjson
import pytest

from furlong import rpc
from furlong.v1 import metrics_pb2, metrics_pb2_grpc
from services.metrics.rows import RowReader
from tests.metrics.running import MetricsProcess, batch, part, until

Make = Callable[..., MetricsProcess]
BATCH = 64
ROWS_A_BATCH = 4
PAUSE = threading.Event()


@dataclass
class Producer:
    """Sends its batches until each is acknowledged, over as many streams as it takes."""

    service: MetricsProcess
    index: int
    num_batches: int
    through: int = 0
    errors: list[str] = field(default_factory=list)

    def batches(self) -> Iterator[metrics_pb2.RecordBatch]:
        """What is not acknowledged yet."""
        for number in range(self.through // BATCH, self.num_batches):
            yield batch(self._bodies(number), first=1 + number * BATCH, producer=f"r/p-{self.index}")

    def _bodies(self, number: int) -> list[bytes]:
        """Log lines, and parts of rows of which this producer says one and its neighbour the other."""
        pair, half = divmod(self.index, 2)
        first_step = (pair * self.num_batches + number) * ROWS_A_BATCH
        parts = [
            part(step, {f"train/{half}": ["sum", step]}, part=f"half-{half}", parts=["half-0", "half-1"])
            for step in range(first_step, first_step + ROWS_A_BATCH)
        ]
        lines = [
            orjson.dumps(
                {"ts": "x", "run": "r", "event": "x", "who": self.index, "n": number * BATCH + n, "text": "y" * 200}
            )
            for n in range(BATCH - ROWS_A_BATCH)
        ]
        return [*parts, *lines]

    def run(self) -> None:
        deadline = time.monotonic() + 240
        while self.through < self.num_batches * BATCH and time.monotonic() < deadline:
            try:
                with rpc.channel(self.service.address) as channel:
                    for ack in metrics_pb2_grpc.MetricsStub(channel).Ingest(self.batches(), timeout=120):
                        self.through = max(self.through, ack.through_sequence)
            except (grpc.RpcError, AssertionError) as error:  # it is being killed, or not there yet
                self.errors.append(repr(error))
                PAUSE.wait(0.05)


def burst(
    service: MetricsProcess, num_producers: int, num_records: int
) -> tuple[list[Producer], list[threading.Thread]]:
    producers = [Producer(service, n, num_records // num_producers // BATCH) for n in range(num_producers)]
    threads = [threading.Thread(target=producer.run, daemon=True) for producer in producers]
    for thread in threads:
        thread.start()
    return producers, threads


def check_all_there_once(service: MetricsProcess, producers: list[Producer]) -> None:
    reader = RowReader(service.run_dir.metrics_store / "metrics.db")
    seen: collections.Counter[tuple[int, int]] = collections.Counter()
    after = 0
    while batches := reader.batches_after(after, 500):
        after = batches[-1].batch_id
        for record in (orjson.loads(body) for stored in batches for body in stored.bodies):
            if record["event"] == "x" and "who" in record:
                seen[record["who"], record["n"]] += 1
    each = [BATCH * number + n for number in range(producers[0].num_batches) for n in range(BATCH - ROWS_A_BATCH)]
    assert seen == collections.Counter({(producer.index, n): 1 for producer in producers for n in each})
    rows = service.rows()
    num_steps = len(producers) // 2 * producers[0].num_batches * ROWS_A_BATCH
    assert sorted(row["step"] for row in rows) == list(range(num_steps))
    assert all(row["complete"] and row["values"] == {"train/0": row["step"], "train/1": row["step"]} for row in rows)


@pytest.mark.parametrize(
    ("num_kills", "num_records", "num_producers"),
    [(3, 8_192, 4), pytest.param(20, 200_704, 8, marks=[pytest.mark.slow, pytest.mark.timeout(280)])],
    ids=["short", "whole"],
)
def test_service_killed_in_a_burst(make: Make, num_kills: int, num_records: int, num_producers: int) -> None:
    service = make(metrics_row_timeout_s=600).start()
    dice = random.Random(num_kills)
    producers, threads = burst(service, num_producers, num_records)
    moments = sorted(dice.randint(num_records // 50, num_records * 9 // 10) for _ in range(num_kills))
    for moment in moments:
        until(lambda: sum(p.through for p in producers) >= moment, f"{moment} acknowledged", limit_s=120)  # noqa: B023
        PAUSE.wait(dice.uniform(0, 0.03))
        service.kill()
        service.start()
    for thread in threads:
        thread.join(120)
    assert [p.through for p in producers] == [p.num_batches * BATCH for p in producers]
    assert sum(len(p.errors) for p in producers) >= num_kills
    service.flush()
    check_all_there_once(service, producers)


PRODUCER = """
import sys, time
from pathlib import Path
from furlong.config import RunConfig
from furlong.rundir import RunDir
from furlong.telemetry import Telemetry
config = RunConfig.model_validate_json(Path(sys.argv[1]).read_bytes())
run_dir, name = RunDir(Path(config.run.run_dir)), f"trainer-{sys.argv[2]}"
telemetry = Telemetry.for_run(config, run_dir, service="trainer", instance=name)
for number in range(int(sys.argv[3])):
    telemetry.record({"event": "x", "run": "r", "who": int(sys.argv[2]), "n": number, "text": "y" * 200})
    if number == 99:
        telemetry.flush(30)  # it is known to the service: from here on it may be killed
    if number % 100 == 99:
        while (stats := telemetry.stats).num_waiting > 5_000:  # its queue never overflows, however slow the machine
            time.sleep(0.01)
        print(number + 1, stats.num_acknowledged, flush=True)
        time.sleep(0.002)
telemetry.close(20)
"""


@pytest.mark.parametrize(
    ("num_producers", "num_records"),
    [(3, 20_000), pytest.param(8, 25_000, marks=[pytest.mark.slow, pytest.mark.timeout(200)])],
    ids=["short", "whole"],
)
def test_producers_killed_in_a_burst(make: Make, num_producers: int, num_records: int) -> None:
    """Each loses only what it had not handed over: its newest records."""
    service = make().start()
    dice = random.Random(num_producers)
    config = str(service.run_dir.root.parent / "config.json")
    command = [sys.executable, "-c", PRODUCER, config]
    processes = [
        subprocess.Popen([*command, str(n), str(num_records)], stdout=subprocess.PIPE, text=True)
        for n in range(num_producers)
    ]
    said = [_kill_after(process, dice.randint(num_records // 10, num_records // 2)) for process in processes]
    if num_producers == 3:  # the service is away at the end: the rest is in their spools
        service.kill()
        service.start()
    until(lambda: not list(service.run_dir.spool.glob("*.spool")), "empty spools", limit_s=60)
    counts = _numbers_stored(service)
    for who, (num_put, num_acknowledged) in enumerate(said):
        stored = counts[who]
        assert set(stored.values()) == {1}
        assert sorted(stored) == list(range(len(stored))), "a gap before the end"
        assert num_acknowledged <= len(stored)
        assert num_put - len(stored) < 12_000  # what waited in its memory


def _kill_after(process: "subprocess.Popen[str]", num_put: int) -> tuple[int, int]:
    """What it last said before it was killed: records put, and acknowledged."""
    assert process.stdout is not None
    last = (0, 0)
    for said in process.stdout:
        put, acknowledged = map(int, said.split())
        last = (put, acknowledged)
        if put >= num_put:
            break
    process.send_signal(signal.SIGKILL)
    process.wait(20)
    return last


def _numbers_stored(service: MetricsProcess) -> dict[int, dict[int, int]]:
    reader = RowReader(service.run_dir.metrics_store / "metrics.db")
    counts: dict[int, dict[int, int]] = collections.defaultdict(lambda: collections.defaultdict(int))
    after = 0
    while batches := reader.batches_after(after, 500):
        after = batches[-1].batch_id
        for record in (json.loads(body) for stored in batches for body in stored.bodies):
            if "who" in record:
                counts[record["who"]][record["n"]] += 1
    return counts
