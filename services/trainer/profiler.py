"""torch's profiler over whole training steps, for a window of rollouts: one gzipped trace a traced rank.

Owns the window and the trace files, which chrome://tracing and Perfetto open. Must never end a run: a trace that
cannot be written is a warning. What was recorded is written on every way out of the run but a kill.
"""

import contextlib
from collections.abc import Generator
from pathlib import Path

import structlog
import torch
from torch.profiler import ProfilerActivity, profile, tensorboard_trace_handler

from furlong.config import RunConfig
from furlong.rundir import RunDir

log = structlog.get_logger()


class TrainProfiler:
    """The profiler of one rank."""

    def __init__(self, config: RunConfig, *, rank: int) -> None:
        trainer = config.trainer
        traced = not trainer.profile_ranks or rank in trainer.profile_ranks
        self._waiting = trainer.use_pytorch_profiler and traced
        self._window = range(trainer.profile_step_start or 0, trainer.profile_step_end or 0)
        self._folder = Path(trainer.tensorboard_dir or RunDir(Path(config.run.run_dir)).traces)
        self._worker = f"trainer_rank{rank}"
        self._with_stack = trainer.pytorch_profiler_collect_callstack
        self._record_shapes = trainer.pytorch_profiler_collect_shapes
        self._running: profile | None = None

    @contextlib.contextmanager
    def training(self, rollout_id: int) -> Generator[None]:
        """Around the training of one rollout: records it if it lies in the window, and writes at the window's end."""
        if self._waiting and rollout_id in self._window:
            self._begin()
        try:
            yield
        finally:
            if rollout_id + 1 >= self._window.stop:
                self._write()

    def close(self) -> None:
        """Write what is still being recorded; say so if the window was never reached. Safe to repeat."""
        self._write()
        if self._waiting:
            self._waiting = False
            log.warning(
                "profile_window_not_reached",
                profile_step_start=self._window.start,
                profile_step_end=self._window.stop,
            )

    def _begin(self) -> None:
        self._waiting = False
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._running = profile(activities=activities, record_shapes=self._record_shapes, with_stack=self._with_stack)
        self._running.start()

    def _write(self) -> None:
        if self._running is None:
            return
        recorded, self._running = self._running, None
        recorded.stop()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            tensorboard_trace_handler(str(self._folder), worker_name=self._worker, use_gzip=True)(recorded)
        except (OSError, RuntimeError) as error:
            log.warning("trace_not_written", folder=str(self._folder), reason=str(error))
        else:
            log.info("trace_written", folder=str(self._folder), worker=self._worker)
