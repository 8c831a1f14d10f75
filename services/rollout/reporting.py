"""Hands the values of a rollout or an evaluation to the metrics service, unless the user's hook took them over.

Runs beside the rollout: a slow hook delays its own report up to its limit, and neither samples nor evaluations. When
too many hooks are under way, or the service ends, reports go without them: the default values are logged.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

import structlog

from furlong.records import Value
from furlong.telemetry import Telemetry
from services.rollout.log_hooks import EvalData, LogHooks
from services.rollout.metrics import reduced
from services.rollout.sample_view import Sample

log = structlog.get_logger()

ROLLOUT_PARTS = ("rollout", "trainer")
MAX_WAITING = 4
"""Reports whose hooks are under way; each holds its samples."""
GRACE_S = 0.2
"""How long a checkpoint waits for hooks, so that what a quick one leaves to us is on disk before it counts."""
END_LIMIT_S = 2.0


@dataclass
class Reporter:
    """Reports in the background what hooks want to see, everything else at once."""

    telemetry: Telemetry
    hooks: LogHooks
    _waiting: "set[asyncio.Task[None]]" = field(default_factory=set)

    def report_rollout(
        self,
        rollout_id: int,
        values: Mapping[str, Value],
        *,
        samples: Callable[[], list[Sample]],
        rollout_time_s: float,
    ) -> None:
        """Report a rollout. samples: makes the copies for the hook; called only if there is one, on its thread."""

        def send(handled: bool) -> None:
            self.telemetry.metrics(
                "rollout/step",
                rollout_id,
                {} if handled else values,  # even empty it is sent: the row waits for this part
                part="rollout",
                parts=ROLLOUT_PARTS,
                rollout_id=rollout_id,
            )

        if not self.hooks.wants_rollouts:
            send(False)
            return
        self._report(
            lambda: self.hooks.handled_rollout(rollout_id, samples, reduced(values), rollout_time_s),
            send,
            name=f"rollout {rollout_id}",
        )

    def report_evaluation(
        self, rollout_id: int, values: Mapping[str, Value], *, samples: Callable[[], dict[str, list[Sample]]]
    ) -> None:
        """Report an evaluation."""

        def send(handled: bool) -> None:
            if not handled:
                self.telemetry.metrics(
                    "eval/step", rollout_id, values, part="rollout", parts=("rollout",), rollout_id=rollout_id
                )

        def data() -> EvalData:
            return {name: _as_miles(group) for name, group in samples().items()}

        if not self.hooks.wants_evaluations:
            send(False)
            return
        self._report(
            lambda: self.hooks.handled_evaluation(rollout_id, data, reduced(values)),
            send,
            name=f"evaluation {rollout_id}",
        )

    async def settle(self) -> None:
        """Wait a moment for the hooks under way."""
        if self._waiting:
            await asyncio.wait(set(self._waiting), timeout=GRACE_S)

    async def finish(self, limit_s: float = END_LIMIT_S) -> None:
        """Wait for the hooks under way, within a limit; the others' reports go without them."""
        if self._waiting:
            await asyncio.wait(set(self._waiting), timeout=limit_s)
        for late in [task for task in self._waiting if not task.done()]:
            log.warning("log_hook_not_waited_for", report=late.get_name(), consequence="the default values are logged")
            late.cancel()
            await asyncio.wait({late})

    def _report(self, ask: Callable[[], Coroutine[Any, Any, bool]], send: Callable[[bool], None], *, name: str) -> None:
        if len(self._waiting) >= MAX_WAITING:
            log.warning("log_hook_left_out", report=name, reason=f"{MAX_WAITING} earlier calls are still under way")
            send(False)
            return

        async def work() -> None:
            handled = False
            try:
                handled = await ask()
            finally:  # also when it is not waited for any more
                send(handled)

        task = asyncio.create_task(work(), name=name)
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)


def _as_miles(samples: list[Sample]) -> dict[str, Any]:  # Any: what Miles hands to evaluation hooks
    return {
        "rewards": [sample.reward for sample in samples],
        "truncated": [sample.status is Sample.Status.TRUNCATED for sample in samples],
        "samples": samples,
    }
