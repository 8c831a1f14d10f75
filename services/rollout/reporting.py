"""Hands the values of a rollout or an evaluation to the metrics service, unless the user's hook took them over.

Runs beside the rollout: a slow hook delays the next report, never the samples by more than its limit.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from furlong.records import Value
from furlong.telemetry import Telemetry
from services.rollout.log_hooks import LogHooks
from services.rollout.metrics import reduced
from services.rollout.sample_view import Sample

ROLLOUT_PARTS = ("rollout", "trainer")


@dataclass
class Reporter:
    """Reports one thing after another."""

    telemetry: Telemetry
    hooks: LogHooks
    _last: "asyncio.Task[None] | None" = field(default=None)

    async def report_rollout(
        self,
        rollout_id: int,
        values: Mapping[str, Value],
        *,
        samples: Callable[[], list[Sample]],
        rollout_time_s: float,
    ) -> None:
        """Report a rollout in the background, once the one before is reported.

        samples: makes the copies for the hook; called only if there is one.
        """
        await self.finish()

        async def work() -> None:
            handled = self.hooks.wants_rollouts and await self.hooks.handled_rollout(
                rollout_id, samples(), reduced(values), rollout_time_s
            )
            self.telemetry.metrics(
                "rollout/step",
                rollout_id,
                {} if handled else values,  # even empty it is sent: the row waits for this part
                part="rollout",
                parts=ROLLOUT_PARTS,
                rollout_id=rollout_id,
            )

        self._last = asyncio.create_task(work(), name="report-rollout")

    async def report_evaluation(
        self, rollout_id: int, values: Mapping[str, Value], *, samples: Callable[[], dict[str, list[Sample]]]
    ) -> None:
        """Report an evaluation."""
        if self.hooks.wants_evaluations:
            data = {name: _as_miles(group) for name, group in samples().items()}
            if await self.hooks.handled_evaluation(rollout_id, data, reduced(values)):
                return
        self.telemetry.metrics(
            "eval/step", rollout_id, values, part="rollout", parts=("rollout",), rollout_id=rollout_id
        )

    async def finish(self) -> None:
        """Wait for the report that is under way; each has its own limit."""
        if self._last is not None:
            last, self._last = self._last, None
            await last


def _as_miles(samples: list[Sample]) -> dict[str, Any]:  # Any: what Miles hands to evaluation hooks
    return {
        "rewards": [sample.reward for sample in samples],
        "truncated": [sample.status is Sample.Status.TRUNCATED for sample in samples],
        "samples": samples,
    }
