"""Rank 0's ear for alerts while the loop runs, and the words by which the metrics service knows that a run is on."""

import contextlib
from collections.abc import Generator

from furlong.alertwatch import AlertWatch
from furlong.process import ExitCode
from furlong.service import ServiceContext
from services.trainer.alert_lines import AlertLines
from services.trainer.row_writer import RowWriter

CLOSE_S = 1.0


@contextlib.contextmanager
def hearing_alerts(context: ServiceContext, rows: RowWriter) -> Generator[None]:
    """Alerts of this attempt are shown, and those of --halt-on request a stop; what nobody watches is warned of."""
    config = context.config
    lines = AlertLines(
        rows,
        context.stop,
        halt_on=frozenset(config.metrics.halt_on),
        as_json=config.run.log_format == "json",
    )
    watch = AlertWatch.for_run(
        config,
        context.run_dir,
        attempt=context.telemetry.attempt,
        on_alert=lines.take,
        on_unwatched=lines.take_unwatched,
    ).start()
    try:
        yield
    finally:
        watch.close(CLOSE_S)


def tell_run_started(context: ServiceContext) -> None:
    """A new attempt: what fired in an earlier one is over."""
    record = {"level": "info", "event": "run_started", "num_rollout": context.config.run.num_rollout}
    context.telemetry.record({**record, "attempt": context.telemetry.attempt})


def tell_run_ended(context: ServiceContext, code: ExitCode) -> None:
    """From now on nobody need be there."""
    context.telemetry.record({"level": "info", "event": "run_ended", "exit_code": int(code)})
