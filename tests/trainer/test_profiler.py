"""The profiler's window: a trace on every way out, none outside, and a fault that costs a warning only."""

import gzip
from pathlib import Path

import orjson
import pytest
import structlog
import torch
from structlog.testing import capture_logs

from furlong.config import RunConfig
from services.trainer.profiler import TrainProfiler

log = structlog.get_logger()


def profiler(folder: Path, *, rank: int = 0, start: int = 1, end: int = 3, **trainer: object) -> TrainProfiler:
    fields = {"use_pytorch_profiler": True, "tensorboard_dir": str(folder), **trainer}
    fields |= {"profile_step_start": start, "profile_step_end": end}
    return TrainProfiler(RunConfig.model_validate({"trainer": fields}), rank=rank)


def train(one: TrainProfiler, *rollout_ids: int) -> None:
    for rollout_id in rollout_ids:
        with one.training(rollout_id):
            torch.ones(8, 8) @ torch.ones(8, 8)


def names_in(trace: Path) -> set[str]:
    return {event.get("name", "") for event in orjson.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}


def test_window_is_written_once_at_its_end(tmp_path: Path) -> None:
    one = profiler(tmp_path)
    train(one, 0, 1)
    assert not list(tmp_path.iterdir())
    train(one, 2, 3)
    one.close()
    (trace,) = tmp_path.iterdir()
    assert trace.name.startswith("trainer_rank0.") and trace.name.endswith(".pt.trace.json.gz")
    assert "aten::mm" in names_in(trace)


def test_run_that_ends_within_the_window_keeps_what_was_recorded(tmp_path: Path) -> None:
    one = profiler(tmp_path, end=50)
    train(one, 0, 1)
    with pytest.raises(ValueError, match="boom"), one.training(2):
        raise ValueError("boom")
    one.close()
    one.close()
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(("ranks", "traced"), [((), True), ((0, 8), False), ((1,), True)])
def test_only_the_named_ranks_are_traced(tmp_path: Path, ranks: tuple[int, ...], traced: bool) -> None:
    one = profiler(tmp_path, rank=1, profile_ranks=ranks)
    train(one, 1, 2)
    assert len(list(tmp_path.iterdir())) == traced


@pytest.mark.parametrize("rollout_ids", [(0,), (5, 6)])
def test_window_that_is_never_reached_is_told(tmp_path: Path, rollout_ids: tuple[int, ...]) -> None:
    one = profiler(tmp_path)
    train(one, *rollout_ids)
    with capture_logs() as lines:
        one.close()
    assert [line["event"] for line in lines] == ["profile_window_not_reached"] and not list(tmp_path.iterdir())


def test_trace_that_cannot_be_written_costs_a_warning(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    one = profiler(blocked / "traces")
    with capture_logs() as lines:
        train(one, 1, 2)
    assert [line["event"] for line in lines] == ["trace_not_written"]
