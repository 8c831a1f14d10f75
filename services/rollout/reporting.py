"""Hands the values of a rollout or an evaluation to the metrics service, unless the user's hook took them over.

Runs beside the rollout: a slow hook delays its own report up to its limit, and neither samples nor evaluations. When
too many hooks are under way, or the service ends or is killed, reports go without them: the default values are logged.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import structlog

from furlong.records import Last, Value
from furlong.telemetry import Telemetry
from services.rollout.log_hooks import EvalData, LogHooks
from services.rollout.metrics import reduced
from services.rollout.sample_view import Sample
from services.rollout.unfinished_reports import Report, UnfinishedReports

log = structlog.get_logger()

ROLLOUT_PARTS = ("rollout", "trainer")
EVAL_PARTS = ("rollout",)
MAX_WAITING = 4
"""Reports whose hooks are under way; each holds its samples."""
GRACE_S = 0.2
"""How long a checkpoint waits for hooks, so that what a quick one leaves to us is on disk before it counts."""
END_LIMIT_S = 2.0
KEPT_S = 8.0
"""What was sent so long ago is acknowledged or in the spool, also when the metrics service hangs."""


@dataclass
class Reporter:
    """Reports in the background what hooks want to see, everything else at once."""

    telemetry: Telemetry
    hooks: LogHooks
    unfinished: UnfinishedReports
    _waiting: "set[asyncio.Task[None]]" = field(default_factory=set)
    _sent: "dict[Report, asyncio.TimerHandle]" = field(default_factory=dict)
    """Kept for the next start still."""

    def report_rollout(
        self,
        rollout_id: int,
        values: Mapping[str, Value],
        *,
        samples: Callable[[], list[Sample]],
        rollout_time_s: float,
    ) -> None:
        """Report a rollout. samples: makes the copies for the hook; called only if there is one, on its thread."""
        report = Report("rollout/step", rollout_id, values, ROLLOUT_PARTS, self.telemetry.attempt)
        if not self.hooks.wants_rollouts:
            self._send(report)
            return
        self._ask(report, lambda: self.hooks.handled_rollout(rollout_id, samples, reduced(values), rollout_time_s))

    def report_evaluation(
        self, rollout_id: int, values: Mapping[str, Value], *, samples: Callable[[], dict[str, list[Sample]]]
    ) -> None:
        """Report an evaluation."""

        def data() -> EvalData:
            return {name: _as_miles(group) for name, group in samples().items()}

        report = Report("eval/step", rollout_id, values, EVAL_PARTS, self.telemetry.attempt)
        if not self.hooks.wants_evaluations:
            self._send(report)
            return
        self._ask(report, lambda: self.hooks.handled_evaluation(rollout_id, data, reduced(values)))

    def report_skipped_evaluation(self, rollout_id: int, reason: str) -> None:
        """Report why an evaluation did not come to an end. Never through the hook: there is nothing for it to log, and
        a gap in the curve has a cause."""
        values: dict[str, Value] = {f"eval/skipped_{reason}": Last(1)}
        self._send(Report("eval/step", rollout_id, values, EVAL_PARTS, self.telemetry.attempt))

    def send_left_over(self) -> None:
        """Send what a killed start of this service may not have sent. Where its hook was cut short, the default values
        are what counts; what arrived before counts once."""
        attempt = self.telemetry.attempt
        for report in self.unfinished.left_over():
            if not report.is_answered:
                log.warning("log_hook_cut_short", report=report.name, consequence="the default values are logged")
            self.telemetry.attempt = report.attempt
            self._send(report)
            self.unfinished.forget(report)
        self.telemetry.attempt = attempt

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
            await asyncio.wait({late}, timeout=END_LIMIT_S)

    async def close(self) -> None:
        """The same at the end of the service, whose telemetry sends or spools what it has."""
        await self.finish()
        for report in list(self._sent):
            self._forget(report)

    def _ask(self, report: Report, ask: Callable[[], Coroutine[Any, Any, bool]]) -> None:
        """Have the hook decide, in the background."""
        if len(self._waiting) >= MAX_WAITING:
            reason = f"{MAX_WAITING} earlier calls are still under way"
            log.warning("log_hook_left_out", report=report.name, reason=reason)
            self._send(report)
            return
        self.unfinished.note(report)

        async def work() -> None:
            handled = False
            try:
                handled = await ask()
            finally:  # also when it is not waited for any more
                told = replace(report, values={} if handled else report.values, is_answered=True)
                self.unfinished.note(told)
                self._send(told)
                self._sent[report] = asyncio.get_running_loop().call_later(KEPT_S, self._forget, report)

        task = asyncio.create_task(work(), name=report.name)
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)

    def _forget(self, report: Report) -> None:
        self._sent.pop(report).cancel()
        self.unfinished.forget(report)

    def _send(self, report: Report) -> None:
        if report.axis == "eval/step" and not report.values:  # the hook took it over: there is no row
            return
        # even empty a rollout's part is sent: the row waits for it
        self.telemetry.metrics(
            report.axis, report.step, report.values, part="rollout", parts=report.parts, rollout_id=report.step
        )


def _as_miles(samples: list[Sample]) -> dict[str, Any]:  # Any: what Miles hands to evaluation hooks
    return {
        "rewards": [sample.reward for sample in samples],
        "truncated": [sample.status is Sample.Status.TRUNCATED for sample in samples],
        "samples": samples,
    }
