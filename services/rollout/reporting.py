"""Hands the values of a rollout or an evaluation to the metrics service, unless the user's hook took them over.

Runs beside the rollout: a slow hook delays its own report up to its limit, and neither samples nor evaluations. When
too many hooks are under way, or the service ends or is killed, reports go without them: the default values are logged.

Each report is kept on disk until it is surely with the metrics service or in the spool; the next start of a killed
service sends what is left. There the part of a row that a later start sends takes the place of what an earlier one
sent, so it counts once; what one start sends twice adds up, so no start does.
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
FLUSH_LIMIT_S = 1.0
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
    _resent: set[tuple[str, int, int]] = field(default_factory=set)
    """Axis, step and attempt of what was sent in place of a killed start."""
    _looked_for_left_over: bool = False
    _skipped: Report | None = None
    """Why the evaluation that was asked for last has not come to an end so far."""

    def rollout_report(self, rollout_id: int, values: Mapping[str, Value], *, attempt: int) -> Report:
        """A rollout's report; nothing is sent."""
        answered = not self.hooks.wants_rollouts
        return Report("rollout/step", rollout_id, values, ROLLOUT_PARTS, attempt, is_answered=answered)

    def note_rollout(self, report: Report) -> None:
        """Keep what is about to be reported. Any thread."""
        self.unfinished.note(report)

    def report_rollout(self, report: Report, *, samples: Callable[[], list[Sample]], rollout_time_s: float) -> None:
        """Report a rollout that was noted. samples: makes the copies for the hook; called only if there is one, on its
        thread."""
        if report.is_answered:
            self._send_and_keep(report)
            return
        values = reduced(report.values)
        self._ask(report, lambda: self.hooks.handled_rollout(report.step, samples, values, rollout_time_s))

    def report_evaluation(
        self, rollout_id: int, values: Mapping[str, Value], *, samples: Callable[[], dict[str, list[Sample]]]
    ) -> None:
        """Report an evaluation."""

        def data() -> EvalData:
            return {name: _as_miles(group) for name, group in samples().items()}

        self._move_on_to(rollout_id)
        self._skipped = None
        answered = not self.hooks.wants_evaluations
        report = Report("eval/step", rollout_id, values, EVAL_PARTS, self.telemetry.attempt, is_answered=answered)
        self.unfinished.note(report)
        if answered:
            self._send_and_keep(report)
            return
        self._ask(report, lambda: self.hooks.handled_evaluation(rollout_id, data, reduced(values)))

    def report_skipped_evaluation(self, rollout_id: int, reason: str, *, is_final: bool) -> None:
        """Report why an evaluation did not come to an end. Never through the hook: there is nothing for it to log, and
        a gap in the curve has a cause.

        is_final: nobody will try again. Else it is told only once the evaluation is given up: one that comes to an end
        after all was not skipped.
        """
        self._move_on_to(rollout_id)
        values: dict[str, Value] = {f"eval/skipped_{reason}": Last(1)}
        self._skipped = Report("eval/step", rollout_id, values, EVAL_PARTS, self.telemetry.attempt)
        if is_final:
            self.give_up_evaluation()

    def give_up_evaluation(self) -> None:
        """The attempt, or this service, ends: an evaluation that has not come to an end by now was skipped."""
        if self._skipped is not None:
            self._send(self._skipped)
        self._skipped = None

    def send_left_over(self, will_report: Callable[[int, int], bool]) -> None:
        """Send what a killed start of this service may not have sent. Where its hook was cut short, the default values
        are what counts. Once a start, before its first report.

        will_report: whether a rollout is reported in an attempt by what is still to come, and must not be here.
        """
        if self._looked_for_left_over:
            return
        self._looked_for_left_over = True
        for report in self.unfinished.left_over():
            if report.axis == "rollout/step" and will_report(report.step, report.attempt):
                self.unfinished.forget(report)
                continue
            if not report.is_answered:
                log.warning("log_hook_cut_short", report=report.name, consequence="the default values are logged")
            self._send_and_keep(report)
            self._resent.add(report.place)

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
        """The same at the end of the service."""
        await self.finish()
        self.give_up_evaluation()
        connected = bool(self._sent) and self.telemetry.stats.connected
        arrived = connected and await asyncio.to_thread(self.telemetry.flush, FLUSH_LIMIT_S)
        for report, timer in list(self._sent.items()):
            timer.cancel()
            if arrived:  # else the next start sends them too
                self._forget(report)

    def _ask(self, report: Report, ask: Callable[[], Coroutine[Any, Any, bool]]) -> None:
        """Have the hook decide, in the background."""
        if len(self._waiting) >= MAX_WAITING:
            reason = f"{MAX_WAITING} earlier calls are still under way"
            log.warning("log_hook_left_out", report=report.name, reason=reason)
            self._send_and_keep(report)
            return

        async def work() -> None:
            handled = False
            try:
                handled = await ask()
            finally:  # also when it is not waited for any more
                told = replace(report, values={} if handled else report.values, is_answered=True)
                self.unfinished.note(told)
                self._send_and_keep(told)

        task = asyncio.create_task(work(), name=report.name)
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)

    def _move_on_to(self, rollout_id: int) -> None:
        """Another evaluation than the last is asked for: that one was skipped."""
        if self._skipped is not None and self._skipped.step != rollout_id:
            self.give_up_evaluation()

    def _send_and_keep(self, report: Report) -> None:
        """Send what was noted, and forget it when it has surely arrived."""
        self._send(report)
        self._sent[report] = asyncio.get_running_loop().call_later(KEPT_S, self._forget, report)

    def _forget(self, report: Report) -> None:
        self._sent.pop(report).cancel()
        self.unfinished.forget(report)

    def _send(self, report: Report) -> None:
        if report.place in self._resent:
            log.info("report_sent_already", report=report.name)
            return
        if report.axis == "eval/step" and not report.values:  # the hook took it over: there is no row
            return
        # even empty a rollout's part is sent: the row waits for it
        attempt, self.telemetry.attempt = self.telemetry.attempt, report.attempt
        self.telemetry.metrics(
            report.axis, report.step, report.values, part="rollout", parts=report.parts, rollout_id=report.step
        )
        self.telemetry.attempt = attempt


def _as_miles(samples: list[Sample]) -> dict[str, Any]:  # Any: what Miles hands to evaluation hooks
    return {
        "rewards": [sample.reward for sample in samples],
        "truncated": [sample.status is Sample.Status.TRUNCATED for sample in samples],
        "samples": samples,
    }
