"""What the service takes, refuses and acknowledges; over a real socket."""

import contextlib
import sqlite3
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import orjson
import psutil
import pytest

from furlong.records import Last, Mean
from furlong.v1 import metrics_pb2, metrics_pb2_grpc
from tests.metrics.running import MetricsProcess, batch, code_of, part, send, until


def query(service: MetricsProcess, statement: str, *values: object) -> list[tuple[Any, ...]]:
    """What the store answers."""
    with contextlib.closing(sqlite3.connect(service.run_dir.metrics_store / "metrics.db")) as store:
        return store.execute(statement, values).fetchall()


def stored(service: MetricsProcess, producer: str) -> int:
    """Records of a producer that are on disk."""
    find = "SELECT num_records FROM batches b JOIN producers p ON p.id = b.producer_id WHERE producer = ?"
    return sum(number for (number,) in query(service, find, producer))


def test_record_that_is_sent_again_is_acknowledged_and_stored_once(service: MetricsProcess, producer: str) -> None:
    bodies = [b'{"event": "a"}', b'{"event": "b"}', b'{"event": "c"}']
    once, twice = batch(bodies[:2], producer=producer), batch(bodies, producer=producer)
    acks = [*send(service, once), *send(service, once, twice)]
    assert [ack.through_sequence for ack in acks if ack.through_sequence == 3]
    assert {ack.through_sequence for ack in acks} <= {2, 3}
    assert stored(service, producer) == 3


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[1]", "got list"),
        (b"3", "got int"),
        (b'{"x": "' + b"y" * 4 * 1024 * 1024 + b'"}', "at most 4194304 bytes"),
        (b"[" * 100_000, "not JSON"),
    ],
    ids=["cut", "bytes", "list", "number", "large", "deep"],
)
def test_bad_record_is_refused_and_the_rest_taken(service: MetricsProcess, producer: str, bad: bytes, why: str) -> None:
    (ack,) = send(service, batch([b'{"event": "a"}', bad, b'{"event": "b"}'], producer=producer))
    assert (ack.through_sequence, ack.num_refused) == (3, 1)
    assert why in ack.first_refusal
    assert stored(service, producer) == 2


HALF_A_PAIR = [
    b'{"run": "half \\ud800"}',
    b'{"event": "heartbeat", "run": "half ?", "service": "trainer", "instance": "a\\ud800", "interval_s": 1}',
    b'{"event": "phase", "run": "half ?", "service": "trainer", "instance": "b", "phase": "c\\udfff", "state": "open"}',
    b'{"event": "metrics", "run": "half ?", "axis": "train/step", "step": 1, "values": {"train/\\ud800": 1}}',
]


def test_half_a_surrogate_pair_holds_up_no_producer_and_ends_no_service(make: Callable[..., MetricsProcess]) -> None:
    service = make().start()
    (ack,) = send(service, batch(HALF_A_PAIR))
    assert (ack.through_sequence, ack.num_refused) == (4, 0)
    known = "SELECT count(*) FROM marks WHERE name = 'alerts/services' AND instr(body, CAST('\"a?\"' AS BLOB))"
    until(lambda: query(service, known) == [(1,)], "what the alerts know of the services on disk")
    assert query(service, "SELECT name FROM runs WHERE name LIKE 'half%'") == [("half ?",)]
    service.flush()
    assert service.wait_row(1)["values"] == {"train/?": 1}


@pytest.mark.parametrize("mild", [b'{"s": "\xff"}', b'{"x": NaN}', b'{"x":\n1}'], ids=["utf8", "nan", "newline"])
def test_record_that_is_nearly_json_is_taken(service: MetricsProcess, producer: str, mild: bytes) -> None:
    (ack,) = send(service, batch([mild], producer=producer))
    assert (ack.through_sequence, ack.num_refused) == (1, 0)
    assert stored(service, producer) == 1


def test_record_of_60000_keys_is_taken(service: MetricsProcess, producer: str, step: int) -> None:
    values: dict[str, object] = {f"perf/key_{n}": ["last", n] for n in range(60_000)}
    (ack,) = send(service, batch([part(step, values)], producer=producer))
    assert ack.num_refused == 0
    assert len(service.wait_row(step)["values"]) == 60_000


def test_telemetry_splits_what_is_larger_than_a_record_may_be(service: MetricsProcess, step: int) -> None:
    telemetry = service.telemetry("splits")
    values = {f"perf/{'long' * 20}_{n}": Mean(float(n), 2) for n in range(60_000)}
    telemetry.metrics("train/step", step, values, part="trainer", parts=["trainer"])
    assert telemetry.close(20.0)
    service.flush()
    assert len(service.rows_of(step)[-1]["values"]) == 60_000


def test_batch_beyond_the_message_limit_costs_only_its_stream(service: MetricsProcess, producer: str) -> None:
    with pytest.raises(grpc.RpcError) as failed:
        send(service, batch([b'{"x": "' + b"y" * 1024 * 1024 + b'"}'] * 70, producer=producer))
    assert code_of(failed.value) == grpc.StatusCode.RESOURCE_EXHAUSTED
    (ack,) = send(service, batch([b"{}"], producer=producer))
    assert ack.through_sequence == 1


def test_batch_of_20_mib_is_taken(service: MetricsProcess, producer: str) -> None:
    (ack,) = send(service, batch([b'{"x": "' + b"y" * 1024 * 1024 + b'"}'] * 20, producer=producer))
    assert (ack.through_sequence, ack.num_refused) == (20, 0)


@pytest.mark.parametrize(
    "broken",
    [{"producer": ""}, {"incarnation": 0}, {"incarnation": 2**63}, {"first": 0}, {"first": 2**63}],
    ids=str,
)
def test_batch_that_cannot_be_numbered_is_an_error(service: MetricsProcess, broken: dict[str, Any]) -> None:
    with pytest.raises(grpc.RpcError) as failed:
        send(service, batch([b"{}"], **broken))
    assert code_of(failed.value) == grpc.StatusCode.INVALID_ARGUMENT


def test_metrics_record_that_fits_no_row_is_kept_as_a_record(service: MetricsProcess, producer: str, step: int) -> None:
    no_parts = orjson.dumps({"event": "metrics"})
    half_good = part(step, {"train/loss": ["last", 1], "x": "?", "y": ["huh", 1]})
    (ack,) = send(service, batch([part(step, {}, axis="no axis"), no_parts, half_good], producer=producer))
    assert ack.num_refused == 0
    assert service.wait_row(step)["values"] == {"train/loss": 1}
    assert stored(service, producer) == 3


def test_numpy_scalars_and_nan_reach_the_row(service: MetricsProcess, step: int) -> None:
    np = pytest.importorskip("numpy")
    torch = pytest.importorskip("torch")
    telemetry = service.telemetry("scalars")
    good = {
        "train/a": Last(np.float32(1)),
        "train/b": Last(np.int64(2)),
        "train/c": Last(np.bool_(True)),
        "train/d": Last(torch.tensor(0.5, dtype=torch.bfloat16)),
        "train/nan": Mean(float("nan"), 3),
        "train/none": Mean(0.0, 0),
    }
    bad: dict[str, Any] = {"train/e": Last([1, 2]), "train/f": Last(None), "train/g": Last("x")}  # type: ignore[arg-type]
    telemetry.metrics("train/step", np.int64(step), {**good, **bad}, part="trainer", parts=["trainer"])
    assert telemetry.close(10.0)
    numbers = {"train/a": 1.0, "train/b": 2.0, "train/c": 1.0, "train/d": 0.5}
    assert service.wait_row(step)["values"] == {**numbers, "train/nan": "NaN", "train/nan/nonfinite": 1}


def test_status_and_rows_over_http(service: MetricsProcess, producer: str, step: int) -> None:
    send(service, batch([part(step, {"eval/x": ["last", 0.5]}, axis="eval/step")], producer=producer))
    service.wait_row(step)
    assert get(service, "/healthz") == (200, {"status": "ok"})
    assert get(service, "/readyz")[0] == 200
    status = get(service, "/api/status")[1]
    assert [(sink["name"], sink["state"]) for sink in status["sinks"]] == [("jsonl", "healthy")]
    assert [row["step"] for row in get(service, "/api/rows?axis=eval/step&last=1")[1]["rows"]] == [step]
    assert get(service, "/api/rows?axis=nonsense") == (200, {"rows": []})
    assert get(service, "/api/rows?last=0")[0] == 400


def get(service: MetricsProcess, path: str) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(service.http + path, timeout=10) as answer:
            return answer.status, orjson.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, orjson.loads(error.read())


def test_newest_attempt_is_what_counts_from_its_first_step_on(service: MetricsProcess, producer: str) -> None:
    def say(step: int, attempt: int) -> bytes:
        return part(step, {"perf/a": ["last", attempt]}, axis="rollout/step", attempt=attempt)

    send(service, batch([say(n, 1) for n in range(10, 15)] + [say(n, 2) for n in (12, 13)], producer=producer))
    service.flush()
    rows = get(service, "/api/rows?axis=rollout/step")[1]["rows"]
    assert [(row["step"], row["attempt"]) for row in rows] == [(10, 1), (11, 1), (12, 2), (13, 2)]


def test_odd_times_are_shown_in_the_status(service: MetricsProcess, producer: str) -> None:
    before = service.status().counts["num_skewed"]
    send(service, batch([b'{"event": "x", "ts": 1}', b'{"event": "x", "ts": "yesterday"}'], producer=producer))
    assert service.status().counts["num_skewed"] == before + 2
    assert service.status().trouble == ""


def test_service_is_light(make: Callable[..., MetricsProcess], producer: str) -> None:
    service = make().start()
    line = orjson.dumps({"event": "x", "text": "y" * 200})
    send(service, *(batch([line] * 256, producer=producer, first=1 + n * 256) for n in range(100)))
    process = psutil.Process(service.process.pid if service.process else 0)
    assert process.memory_info().rss < 150e6
    assert not [m for m in process.memory_maps() if "torch" in m.path or "wandb" in m.path]


def test_message_of_very_many_tiny_records_is_one_batch_to_its_producer(
    service: MetricsProcess, producer: str, step: int
) -> None:
    records = [b"{}"] * 10_000 + [part(step, {"train/x": 1}), b"no JSON"]
    acks = send(service, batch(records, producer=producer), batch([b"{}"], producer=producer, first=len(records) + 1))
    assert acks[-1].through_sequence == len(records) + 1
    assert sum(ack.num_refused for ack in acks) == 1
    assert stored(service, producer) == len(records)
    assert service.wait_row(step)


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_producer_that_reads_no_acknowledgement_holds_nobody_up(service: MetricsProcess, producer: str) -> None:
    """16 of its batches of 1 MiB are stored and wait to be told; others are taken all the same."""
    name = ("deaf" + producer).ljust(500, "x")  # long: soon no more acknowledgements can be on their way unread
    record = orjson.dumps({"event": "x", "text": "y" * (1024 * 1024)})
    done = threading.Event()

    def batches() -> Iterator[metrics_pb2.RecordBatch]:
        for number in range(600):
            if done.is_set():
                return
            yield batch([record], producer=name, first=number + 1)

    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]
    stub = metrics_pb2_grpc.MetricsStub(grpc.insecure_channel(service.address, options))
    call = stub.Ingest(batches(), timeout=100)
    counts = [-1, service.status().num_records]
    while counts[-1] != counts[-2] or counts[-1] - counts[1] < 20:
        done.wait(1.0)
        counts.append(service.status().num_records)
    assert counts[-1] - counts[1] < 600, "it is not deaf: it proves nothing"
    (ack,) = send(service, batch([b"{}"], producer=producer))
    assert ack.through_sequence == 1
    done.set()
    call.cancel()
