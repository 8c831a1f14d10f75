"""Whole trainer processes: two ranks against one, signals, ranks that die."""

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from safetensors.torch import load_file

from furlong import rpc
from furlong.addresses import find
from furlong.process import ExitCode
from furlong.rundir import RunDir
from furlong.v1 import trainer_pb2, trainer_pb2_grpc
from tests.trainer.conftest import ConfigMaker
from tests.trainer.fake_rollout import FakeRollout, serve
from tests.trainer.harness import run_trainer
from tests.trainer.rank_process import end, start

STARTS_WITHIN_S = 60.0


@pytest.fixture
def fake(model_dir: Path, tmp_path: Path) -> Iterator[FakeRollout]:
    fake = FakeRollout(model_dir, num_groups=3, per_group=3)
    server = serve(fake, RunDir(tmp_path / "run").create())
    yield fake
    server.grpc.stop(None)


def until_called(fake: FakeRollout, call: str) -> threading.Event:
    """An event that is set when the trainer makes this call; the call then waits a moment for the test."""
    reached = threading.Event()
    fake.before[call] = lambda context: reached.set()
    return reached


def test_two_ranks_train_what_one_trains(
    fake: FakeRollout, make_config: ConfigMaker, model_dir: Path, tmp_path: Path
) -> None:
    """9 samples over 2 ranks: nothing is dropped. Then the checkpoint of two ranks is taken up by one."""
    knobs = {"rollout_batch_size": 3, "n_samples_per_prompt": 3, "max_tokens_per_gpu": 40}
    config = make_config(trainer_num_ranks=2, num_rollout=2, **knobs)
    ends = end(start(config, 0), start(config, 1))
    assert [code for code, _, _ in ends] == [0, 0], ends
    alone_dir = RunDir(tmp_path / "alone").create()
    server = serve(FakeRollout(model_dir, num_groups=3, per_group=3), alone_dir)
    run_trainer(make_config(num_rollout=2, run_dir=str(alone_dir.root), **knobs))
    server.grpc.stop(None)
    weights = "checkpoints/rollout_000001/hf/model.safetensors"
    two, one = load_file(tmp_path / "run" / weights), load_file(alone_dir.root / weights)
    assert two.keys() == one.keys()
    for name, tensor in one.items():
        assert float((two[name] - tensor).norm() / tensor.norm()) < 1e-4, name
    resumed = run_trainer(make_config(num_rollout=3, **knobs))
    assert resumed.code is ExitCode.DONE and fake.versions == [0, 1, 2, 2, 3]


def test_sigterm_drains_with_a_checkpoint(fake: FakeRollout, make_config: ConfigMaker, tmp_path: Path) -> None:
    fake_reached = until_called(fake, "CommitWeightUpdate")
    process = start(make_config(num_rollout=10_000), 0)
    assert fake_reached.wait(STARTS_WITHIN_S)
    deadline = time.monotonic() + STARTS_WITHIN_S
    while len(fake.versions) < 3 and time.monotonic() < deadline:
        threading.Event().wait(0.01)
    process.send_signal(signal.SIGTERM)
    ((code, output, errors),) = end(process)
    assert code == ExitCode.DRAINED, errors
    assert output.count("iter ") == fake.committed[-1] + 1


def test_sigterm_while_the_first_weights_hang_ends_at_once(fake: FakeRollout, make_config: ConfigMaker) -> None:
    held, reached = threading.Event(), threading.Event()

    def hang(context: grpc.ServicerContext) -> None:
        reached.set()
        held.wait(60)

    fake.before["BeginWeightUpdate"] = hang
    process = start(make_config(num_rollout=3), 0)
    try:
        assert reached.wait(STARTS_WITHIN_S)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=5) == ExitCode.DRAINED
    finally:
        held.set()


@pytest.mark.slow
def test_status_and_stop_over_grpc_and_the_end_of_a_done_run(fake: FakeRollout, make_config: ConfigMaker) -> None:
    config = make_config(num_rollout=10_000, save_interval=1)  # a stop for bad numbers saves nothing more
    run_dir = RunDir(Path(config.run.run_dir))
    reached = until_called(fake, "CommitCheckpoint")
    process = start(config, 0)
    assert reached.wait(STARTS_WITHIN_S)
    entry = find(run_dir, "trainer-0")
    assert entry is not None and entry.grpc is not None
    with rpc.channel(entry.grpc) as channel:
        stub = trainer_pb2_grpc.TrainerStub(channel)
        status = stub.GetStatus(trainer_pb2.GetTrainerStatusRequest(), timeout=10)
        assert status.num_rollout == 10_000 and status.world_size == 1
        stub.RequestStop(trainer_pb2.RequestStopRequest(reason="diverged", diverged=True), timeout=10)
    ((code, _, errors),) = end(process)
    assert code == ExitCode.DIVERGED, errors
    trained = fake.committed[-1] + 1
    (run_dir.root.parent / "config.toml").unlink()
    ((code, output, _),) = end(start(make_config(num_rollout=trained), 0))
    assert code == ExitCode.DONE and "already done" in output


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_other_ranks_end_when_one_is_killed(fake: FakeRollout, make_config: ConfigMaker, victim: int) -> None:
    """While rank 0 waits for samples, longer than a collective may take."""
    released, waiting = threading.Event(), threading.Event()

    def hang(context: grpc.ServicerContext) -> None:
        waiting.set()
        released.wait(60)

    fake.before["NextBatch"] = hang
    config = make_config(trainer_num_ranks=2, distributed_timeout_s=5.0, rollout_batch_size=3, n_samples_per_prompt=3)
    ranks = [start(config, 0), start(config, 1)]
    assert waiting.wait(STARTS_WITHIN_S)
    assert ranks[1].poll() is None
    ranks[victim].kill()
    begun = time.monotonic()
    ((code, _, errors),) = end(ranks[1 - victim], timeout_s=20)
    released.set()
    assert code == ExitCode.PEER_LOST, errors
    assert time.monotonic() - begun < 5.0
    end(ranks[victim])


@pytest.mark.slow
def test_rollout_longer_than_a_collective_may_take(fake: FakeRollout, make_config: ConfigMaker) -> None:
    def linger(context: grpc.ServicerContext) -> None:
        threading.Event().wait(7.0)

    fake.before["NextBatch"] = linger
    config = make_config(
        trainer_num_ranks=2, distributed_timeout_s=3.0, num_rollout=1, rollout_batch_size=3, n_samples_per_prompt=3
    )
    ends = end(start(config, 0), start(config, 1))
    assert [code for code, _, _ in ends] == [0, 0], ends


@pytest.mark.slow
def test_sigterm_to_another_rank_ends_all(fake: FakeRollout, make_config: ConfigMaker) -> None:
    reached = until_called(fake, "NextBatch")
    config = make_config(trainer_num_ranks=2, num_rollout=10_000, rollout_batch_size=3, n_samples_per_prompt=3)
    ranks = [start(config, 0), start(config, 1)]
    assert reached.wait(STARTS_WITHIN_S)
    ranks[1].send_signal(signal.SIGTERM)
    ends = end(*ranks)
    assert [code for code, _, _ in ends] == [ExitCode.DRAINED, ExitCode.DRAINED], ends
