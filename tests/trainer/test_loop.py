"""The loop against a rollout service over gRPC, with real receivers of the weights."""

import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from furlong import addresses, rpc
from furlong.process import ExitCode, StopSignal
from furlong.rundir import RunDir
from furlong.v1 import metrics_pb2, metrics_pb2_grpc
from services.trainer.checkpoint import Checkpoints
from services.trainer.publisher import WeightSyncError
from services.trainer.ranks import PeerLost
from services.trainer.session import RolloutFailed
from tests.trainer.conftest import ConfigMaker
from tests.trainer.fake_rollout import FakeRollout, serve
from tests.trainer.harness import run_trainer


class Place:
    """A fake rollout that serves a run directory, and can be replaced as if killed and started again."""

    def __init__(self, model_dir: Path, root: Path) -> None:
        self._model_dir, self._run_dir = model_dir, RunDir(root).create()
        self.fake, self._server = self._start()
        self.past: list[FakeRollout] = []

    def _start(self) -> tuple[FakeRollout, rpc.SyncServer]:
        fake = FakeRollout(self._model_dir, num_engines=2)
        return fake, serve(fake, self._run_dir)

    def replace(self) -> None:
        self.past.append(self.fake)
        self._server.grpc.stop(None)
        self.fake, self._server = self._start()

    def close(self) -> None:
        self._server.grpc.stop(None)


@pytest.fixture
def place(model_dir: Path, tmp_path: Path) -> Iterator[Place]:
    place = Place(model_dir, tmp_path / "run")
    yield place
    place.close()


def holding(released: threading.Event, limit_s: float) -> Callable[[grpc.ServicerContext], None]:
    """Keeps a call waiting until released."""

    def hold(context: grpc.ServicerContext) -> None:
        released.wait(limit_s)

    return hold


def weights(tmp_path: Path, rollout_id: int, run: str = "run") -> str:
    folder = tmp_path / run / "checkpoints" / f"rollout_{rollout_id:06d}"
    files = ("hf/model.safetensors", "optimizer.safetensors")
    return "".join(hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in files)


def test_run_trains_publishes_reports_and_saves(place: Place, make_config: ConfigMaker, tmp_path: Path) -> None:
    run = run_trainer(make_config(num_rollout=3, save_interval=2, eval_interval=2, update_weight_buffer_size=20_000))
    assert run.code is ExitCode.DONE
    assert place.fake.versions == [0, 1, 2, 3]
    assert place.fake.calls.count("JoinWeightGroup") == 1  # one group for the whole run
    assert place.fake.committed == [1, 2]
    assert [call for call in place.fake.calls if call.startswith("Evaluate")] == [
        "Evaluate -1 0",
        "Evaluate 1 2",
        "Evaluate 2 3",  # the last weights are evaluated whatever the interval
    ]
    assert run.output.count("[trainer] iter ") == 3 and "iter 3/3 |" in run.output
    rows = run.telemetry.rows
    assert [step for axis, step, _ in rows if axis == "train/step"] == [1, 2, 3]
    assert [step for axis, step, _ in rows if axis == "rollout/step"] == [0, 1, 2]
    assert ("rollout/step", "trainer", ("rollout", "trainer")) in run.telemetry.parts


def test_engine_log_probs_agree_with_the_trainers(place: Place, make_config: ConfigMaker) -> None:
    """The published weights are the trained ones: the log-probs that they give differ by rounding alone."""
    run = run_trainer(make_config(num_rollout=3, lr=1e-2))
    for values in run.telemetry.of("train/step"):
        assert values["train/train_rollout_logprob_abs_diff"] == pytest.approx(0.0, abs=1e-5)


def test_perf_parts_add_up_to_the_measured_total(place: Place, make_config: ConfigMaker) -> None:
    run = run_trainer(make_config(num_rollout=2, save_interval=1))
    for row in run.telemetry.of("rollout/step"):
        names = ("train_wait_time", "train_time", "p2p_time", "save_time", "other_time")
        parts = sum(row[f"perf/{name}"] or 0.0 for name in names)
        assert parts == pytest.approx(row["perf/step_time"], abs=1e-6)
        assert "perf/actor_train_tflops" in row and "perf/actor_train_mfu" not in row
        assert row["rollout/staleness/max"] == 0
        assert row["rollout/advantages"] == pytest.approx(0.0, abs=1e-5)


def test_resume_is_bit_for_bit_an_unbroken_run(
    place: Place, make_config: ConfigMaker, model_dir: Path, tmp_path: Path
) -> None:
    run_trainer(make_config(num_rollout=4, save_interval=2))
    other = Place(model_dir, tmp_path / "broken")
    broken = {"run_dir": str(tmp_path / "broken"), "save_interval": 2}
    run_trainer(make_config(num_rollout=2, **broken))
    other.replace()  # rollout is killed too
    resumed = run_trainer(make_config(num_rollout=4, **broken))
    other.close()
    assert other.fake.attempts == [2] and other.fake.restored == [b'{"next": 2}']
    assert other.fake.versions == [2, 3, 4]  # it goes on, and never back
    assert resumed.telemetry.rows[0][:2] == ("train/step", 3)
    assert weights(tmp_path, 3) == weights(tmp_path, 3, "broken")


SLOW_MOMENTS = [pytest.param(name, marks=pytest.mark.slow) for name in ("SaveState", "BeginWeightUpdate")]


@pytest.mark.parametrize("moment", ["NextBatch", "ReceiveBucket 0", *SLOW_MOMENTS])
def test_rollout_killed_at_any_moment_changes_nothing(
    place: Place, make_config: ConfigMaker, model_dir: Path, tmp_path: Path, moment: str
) -> None:
    calm = Place(model_dir, tmp_path / "calm")
    run_trainer(make_config(num_rollout=3, run_dir=str(tmp_path / "calm")))
    calm.close()
    count = 0

    def die(context: grpc.ServicerContext) -> None:
        nonlocal count
        count += 1
        if count == 2:
            place.replace()

    place.fake.before[moment] = die
    run = run_trainer(make_config(num_rollout=3))
    assert run.code is ExitCode.DONE and len(place.past) == 1
    assert weights(tmp_path, 2) == weights(tmp_path, 2, "calm")
    assert {**place.past[0].served, **place.fake.served} == calm.fake.served


def test_rollout_gone_for_good_keeps_what_is_trained(place: Place, make_config: ConfigMaker) -> None:
    def die(context: grpc.ServicerContext) -> None:
        if len(place.fake.versions) == 3:
            addresses.publish(RunDir(Path(config.run.run_dir)), "rollout", grpc="127.0.0.1:9")
            place.close()

    place.fake.before["BeginWeightUpdate"] = die
    config = make_config(num_rollout=9, start_timeout_s=1.0)
    with pytest.raises(PeerLost):
        run_trainer(config)
    newest = Checkpoints(Path(config.run.run_dir) / "checkpoints", keep=2).newest()
    assert newest is not None and newest.meta.rollout_id == 2  # trained, though never published


def test_rollout_without_any_sample_is_told_and_survived(place: Place, make_config: ConfigMaker) -> None:
    place.fake.num_groups = 0
    run = run_trainer(make_config(num_rollout=2))
    assert run.code is ExitCode.DONE and "loss=n/a reward=n/a" in run.output
    assert [values["train/num_tokens"] for values in run.telemetry.of("train/step")] == [0, 0]


def test_stop_ends_after_the_iteration_with_a_checkpoint(
    place: Place, make_config: ConfigMaker, tmp_path: Path
) -> None:
    stop = StopSignal()
    place.fake.before["Evaluate 0 1"] = lambda context: stop.request("SIGTERM")
    run = run_trainer(make_config(num_rollout=50, eval_interval=1), stop=stop)
    assert run.code is ExitCode.DRAINED
    assert place.fake.committed == [0] and weights(tmp_path, 0)


def test_diverged_stop_has_its_own_code(place: Place, make_config: ConfigMaker) -> None:
    stop = StopSignal()
    place.fake.before["SaveState"] = lambda context: stop.request("loss is nan", code=ExitCode.DIVERGED)
    assert run_trainer(make_config(num_rollout=50), stop=stop).code is ExitCode.DIVERGED


def test_stop_while_waiting_for_samples_is_bounded(place: Place, make_config: ConfigMaker) -> None:
    stop, released = StopSignal(), threading.Event()

    def hang(context: grpc.ServicerContext) -> None:
        if len(place.fake.versions) == 2:
            stop.request("SIGTERM")
            released.wait(20)

    place.fake.before["NextBatch"] = hang
    run = run_trainer(make_config(num_rollout=50, drain_budget_s=1.0), stop=stop)
    released.set()
    assert run.code is ExitCode.DRAINED and place.fake.committed == [0]


@pytest.mark.parametrize("num_rollout", [1, 3])
def test_stop_while_evaluating_is_bounded_and_made_up_for(
    place: Place, make_config: ConfigMaker, num_rollout: int
) -> None:
    """Also when nothing else is left to do."""
    stop, released = StopSignal(), threading.Event()

    def hang(context: grpc.ServicerContext) -> None:
        stop.request("SIGTERM")
        released.wait(20)

    place.fake.before["Evaluate 0 1"] = hang
    config = make_config(num_rollout=num_rollout, eval_interval=1, drain_budget_s=1.0)
    run = run_trainer(config, stop=stop)
    released.set()
    del place.fake.before["Evaluate 0 1"]
    assert run.code is ExitCode.DRAINED and place.fake.committed == [0] and "iter 1/" in run.output
    assert Checkpoints(Path(config.run.run_dir) / "checkpoints", keep=2).owes_evaluation()
    assert run_trainer(config).code is ExitCode.DONE
    assert place.fake.calls.count("Evaluate 0 1") == 2 and place.fake.calls.count("Evaluate -1 0") == 1
    assert not Checkpoints(Path(config.run.run_dir) / "checkpoints", keep=2).owes_evaluation()


def test_stop_while_rollout_is_gone_saves_within_the_budget(place: Place, make_config: ConfigMaker) -> None:
    stop = StopSignal()

    def die(context: grpc.ServicerContext) -> None:
        if len(place.fake.versions) == 3:
            addresses.publish(RunDir(Path(config.run.run_dir)), "rollout", grpc="127.0.0.1:9")
            place.close()
            stop.request("SIGTERM")

    place.fake.before["BeginWeightUpdate"] = die
    config = make_config(num_rollout=9, start_timeout_s=60.0, drain_budget_s=2.0)
    started = time.monotonic()
    assert run_trainer(config, stop=stop).code is ExitCode.DRAINED
    assert time.monotonic() - started < 15.0
    newest = Checkpoints(Path(config.run.run_dir) / "checkpoints", keep=2).newest()
    assert newest is not None and newest.meta.rollout_id == 2


def test_failed_update_is_aborted_and_done_again_over_a_new_group(place: Place, make_config: ConfigMaker) -> None:
    def break_once(context: grpc.ServicerContext) -> None:
        del place.fake.before["ReceiveBucket 0"]
        context.abort(grpc.StatusCode.INTERNAL, "engine-0 answered 500")

    place.fake.before["ReceiveBucket 0"] = break_once
    run = run_trainer(make_config(num_rollout=1))
    assert run.code is ExitCode.DONE and place.fake.versions == [0, 1]
    assert place.fake.calls.count("AbortWeightUpdate") == 1
    assert place.fake.calls.count("JoinWeightGroup") == 2


@pytest.mark.parametrize("step", ["BeginWeightUpdate", "JoinWeightGroup", "ReceiveBucket 0", "CommitWeightUpdate"])
def test_update_that_always_fails_is_an_error_that_names_it(place: Place, make_config: ConfigMaker, step: str) -> None:
    place.fake.before[step] = lambda context: context.abort(grpc.StatusCode.DATA_LOSS, f"{step} went wrong")
    with pytest.raises(WeightSyncError, match=f"version 0 did not reach the engines.*{step} went wrong"):
        run_trainer(make_config())
    assert place.fake.calls.count("AbortWeightUpdate") == 2 and place.fake.versions == []


@pytest.mark.parametrize(
    "step",
    ["ReceiveBucket 0", *(pytest.param(f"{name}WeightUpdate", marks=pytest.mark.slow) for name in ("Begin", "Commit"))],
)
def test_silent_update_ends_within_its_limit(place: Place, make_config: ConfigMaker, step: str) -> None:
    released = threading.Event()
    place.fake.before[step] = holding(released, 20.0)
    with pytest.raises(WeightSyncError, match="--update-weight-timeout-s"):
        run_trainer(make_config(update_weight_timeout_s=0.5))
    released.set()


def test_refused_request_is_an_error_and_no_endless_retry(place: Place, make_config: ConfigMaker) -> None:
    place.fake.before["NextBatch"] = lambda context: context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no such id")
    with pytest.raises(RolloutFailed, match="INVALID_ARGUMENT: no such id"):
        run_trainer(make_config())
    assert place.fake.calls.count("NextBatch") == 1


def test_checkpoint_is_a_folder_that_transformers_loads(place: Place, make_config: ConfigMaker, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run_trainer(make_config(num_rollout=1))
    folder = tmp_path / "run" / "checkpoints" / "rollout_000000" / "hf"
    lm: Any = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(lm.model.norm.weight, place.fake.lm.model.norm.weight)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.vocab_size == 24


def test_other_models_checkpoint_is_refused(place: Place, make_config: ConfigMaker) -> None:
    from furlong.config import ConfigError

    run_trainer(make_config(num_rollout=1))
    with pytest.raises(ConfigError, match=r"model\.dtype: saved float32, now bfloat16"):
        run_trainer(make_config(num_rollout=2, dtype="bfloat16"))


class AlertingMetrics(metrics_pb2_grpc.MetricsServicer):
    """A metrics service that tells one alert as soon as rollout 1 is asked for."""

    def __init__(self, alert: metrics_pb2.Alert) -> None:
        self.alert, self.now = alert, threading.Event()
        self.server = rpc.start_sync_server(
            lambda server: metrics_pb2_grpc.add_MetricsServicer_to_server(self, server),
            names=("furlong.v1.Metrics",),
            host="127.0.0.1",
        )

    def WatchAlerts(
        self, request: metrics_pb2.WatchAlertsRequest, context: grpc.ServicerContext
    ) -> Iterator[metrics_pb2.Alert]:
        context.send_initial_metadata(())
        context.add_callback(self.now.set)
        self.now.wait(20)
        yield self.alert


@pytest.mark.parametrize("diverged", [True, False])
def test_an_alert_halts_the_run_after_its_iteration_and_saves_only_what_is_sound(
    place: Place, make_config: ConfigMaker, tmp_path: Path, diverged: bool
) -> None:
    alert = metrics_pb2.Alert(id=1, run="run", rule="x", state=metrics_pb2.Alert.FIRING, diverged=diverged)
    metrics = AlertingMetrics(alert)  # type: ignore[abstract]  # only what is called here
    stop = StopSignal()
    asked = 0

    def hold(context: grpc.ServicerContext) -> None:
        nonlocal asked
        asked += 1
        if asked == 2:
            metrics.now.set()
            stop.requested.wait(20)

    place.fake.before["NextBatch"] = hold
    run = run_trainer(make_config(num_rollout=9, metrics_addr=metrics.server.address, halt_on=("x",)), stop=stop)
    metrics.server.grpc.stop(None)
    assert run.code is (ExitCode.DIVERGED if diverged else ExitCode.HALTED)
    assert place.fake.versions == [0, 1, 2] and "the run stops for it (--halt-on x)" in run.output
    assert Checkpoints(tmp_path / "run" / "checkpoints", keep=2).newest_rollout_id() == (None if diverged else 1)
