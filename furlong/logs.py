"""Logging of every process: one JSON object a line, to a file, to stderr if asked, and to the metrics service.

    log = structlog.get_logger()
    log.info("weights_loaded", version=7, seconds=1.8)

Owns the set-up of structlog and of the standard library's logging (whose warnings and errors go the same way). A log
call never raises and never waits: for a full disk, a closed or unread stderr, or an object that cannot be printed.
"""

import contextlib
import logging
import os
import sys
import traceback
from collections.abc import Generator, MutableMapping
from pathlib import Path
from typing import Any

import structlog
from structlog.contextvars import get_contextvars, unbind_contextvars

from furlong.clock import now_iso
from furlong.jsonline import NO_SECRETS, Secrets, clip, to_line
from furlong.linefile import AppendedFile, LineFile, open_appending, standard_error
from furlong.telemetry import Telemetry

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}
_IDENTITY = ("ts", "level", "event", "run", "service", "instance", "rank")
_NOT_PROPAGATING = ("transformers", "uvicorn", "uvicorn.error", "uvicorn.access", "wandb", "grpc")


class _Pipeline:
    """Where lines go; one a process, replaced by `configure`."""

    def __init__(self) -> None:
        self.identity: dict[str, object] = {}
        self.level = LEVELS["info"]
        self.outputs: tuple[LineFile, ...] = ()
        self.telemetry: Telemetry | None = None
        self.secrets = NO_SECRETS

    def emit(self, level: str, event: object, fields: MutableMapping[str, object]) -> None:
        """Write one line everywhere it goes. Never raises."""
        try:
            line = self._line(level, event, fields)
            for output in self.outputs:
                output.write_line(line)
            if self.telemetry is not None:
                self.telemetry.ship(line, LEVELS.get(level, 20))
        except Exception as error:  # a log call must never be what fails
            _last_resort(error)

    def _line(self, level: str, event: object, fields: MutableMapping[str, object]) -> bytes:
        bound = get_contextvars()
        line: dict[str, object] = {"ts": now_iso(), "level": level, "event": event, **self.identity}
        if bound:
            if "rank" in bound:
                line["rank"] = bound["rank"]
            fields = {**bound, **fields}
        exc_info = fields.pop("exc_info", None)
        for key, value in fields.items():
            if key not in line:
                line[key] = value
            elif not (key == "rank" and bound and bound.get("rank") is value):
                line[f"{key}_"] = value
        if exc_info:
            line["exception"] = exception_text(exc_info, self.secrets)
        return to_line(line, secrets=self.secrets)


_pipeline = _Pipeline()


def configure(
    *,
    run: str,
    service: str,
    instance: str,
    rank: int | None = None,
    level: str = "info",
    path: Path | None,
    to_stderr: bool = False,
    telemetry: Telemetry | None,
) -> None:
    """Set up logging of this process; may be called again, also in a forked child.

    rank: a trainer rank's number; others have none. path: file to append to. telemetry: also ship the lines.
    """
    identity: dict[str, object] = {"run": run, "service": service, "instance": instance}
    if rank is not None:
        identity["rank"] = rank
    outputs: list[LineFile] = [open_appending(path)] if path is not None else []
    if to_stderr:
        outputs.append(standard_error())
    previous = _pipeline.outputs
    _pipeline.secrets = Secrets.from_environment()
    _pipeline.identity, _pipeline.level = identity, LEVELS[level]
    _pipeline.telemetry, _pipeline.outputs = telemetry, tuple(outputs)
    for output in previous:
        output.close()
    if telemetry is not None:
        telemetry.identify(identity, _pipeline.secrets)
    _configure_structlog()
    _configure_standard_library()
    if any(isinstance(output, AppendedFile) and output.was_torn for output in outputs):
        structlog.get_logger().warning(
            "torn_line_ended", path=str(path), consequence="an earlier start's last line is cut"
        )


@contextlib.contextmanager
def not_to_stderr() -> Generator[None]:
    """For what is told on stderr in words for people: lines go only to the file and the metrics service meanwhile."""
    outputs = _pipeline.outputs
    _pipeline.outputs = tuple(output for output in outputs if isinstance(output, AppendedFile))
    try:
        yield
    finally:
        _pipeline.outputs = outputs


def secrets() -> Secrets:
    """What is redacted from this process's lines."""
    return _pipeline.secrets


def exception_text(exc_info: object, secrets: Secrets = NO_SECRETS) -> str:
    """The traceback as text, clipped in front: its end says what went wrong. Never raises."""
    try:
        error = exc_info if isinstance(exc_info, BaseException) else None
        if error is None:
            found = exc_info if isinstance(exc_info, tuple) else sys.exc_info()
            error = found[1]
        if error is None:
            return ""
        text = secrets.redact("".join(traceback.format_exception(error, limit=-50)))
    except Exception as failure:  # an exception's own __str__ or __cause__
        return f"[unprintable exception: {type(failure).__name__}]"
    return clip(text if len(text) <= 12_000 else f"[{len(text) - 12_000} more characters]...{text[-12_000:]}")


def _in_forked_child() -> None:
    """A child is not its parent: the rank goes, until the child says its own."""
    _pipeline.identity = {key: value for key, value in _pipeline.identity.items() if key != "rank"}
    unbind_contextvars("rank")


os.register_at_fork(after_in_child=_in_forked_child)


class BoundLogger(structlog.BoundLoggerBase):
    """What `structlog.get_logger()` gives. The level is looked up at each call: cached loggers follow `configure`."""

    def _log(self, level: str, event: object, args: tuple[object, ...], fields: dict[str, object]) -> None:
        if LEVELS[level] < _pipeline.level:
            return
        if args:
            event = _formatted(event, args)
        if "event" in fields:
            fields["event_"] = fields.pop("event")
        try:
            self._process_event(level, event, fields)  # type: ignore[arg-type]
        except structlog.DropEvent:  # `structlog.testing.capture_logs`
            return
        except Exception as error:  # a processor that somebody added
            _last_resort(error)

    def debug(self, event: object = None, /, *args: object, **fields: object) -> None:
        self._log("debug", event, args, fields)

    def info(self, event: object = None, /, *args: object, **fields: object) -> None:
        self._log("info", event, args, fields)

    def warning(self, event: object = None, /, *args: object, **fields: object) -> None:
        self._log("warning", event, args, fields)

    def error(self, event: object = None, /, *args: object, **fields: object) -> None:
        self._log("error", event, args, fields)

    def critical(self, event: object = None, /, *args: object, **fields: object) -> None:
        self._log("critical", event, args, fields)

    def exception(self, event: object = None, /, *args: object, **fields: object) -> None:
        fields.setdefault("exc_info", sys.exc_info())
        self._log("error", event, args, fields)

    warn, msg, fatal = warning, info, critical


def _emit(logger: object, level: str, fields: MutableMapping[str, Any]) -> str:
    """structlog's last processor: writes the line. Any: structlog's own type of an event."""
    _pipeline.emit(level, fields.pop("event", None), fields)
    return ""


_PROCESSORS: list[structlog.typing.Processor] = [_emit]  # one list for ever: cached loggers hold it, and so do captures


def _configure_structlog() -> None:
    structlog.configure(
        processors=_PROCESSORS,
        wrapper_class=BoundLogger,
        context_class=dict,
        logger_factory=lambda *args: None,
        cache_logger_on_first_use=True,
    )


class _Bridge(logging.Handler):
    """Takes what the standard library's loggers say into the same lines."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.__dict__.get("furlong_taken"):  # by a logger's own handler, before the root's
            return
        record.furlong_taken = True
        try:
            message = record.getMessage()
        except Exception as error:  # arguments that do not fit the format
            message = f"{record.msg!r:.1000} [bad arguments: {type(error).__name__}]"
        fields: dict[str, object] = {"logger": record.name, "message": message}
        if record.exc_info:
            fields["exc_info"] = record.exc_info
        level = {30: "warning", 40: "error", 50: "critical"}.get(record.levelno, "warning")
        _pipeline.emit(level, "library_log", fields)


def _configure_standard_library() -> None:
    bridge = _Bridge(logging.WARNING)
    root = logging.getLogger()
    for name in ("", *_NOT_PROPAGATING):
        logger = logging.getLogger(name) if name else root
        for old in [handler for handler in logger.handlers if isinstance(handler, _Bridge)]:
            logger.removeHandler(old)
    root.addHandler(bridge)
    for name in _NOT_PROPAGATING:
        logging.getLogger(name).addHandler(bridge)
    logging.captureWarnings(True)
    logging.raiseExceptions = False


def _formatted(event: object, args: tuple[object, ...]) -> object:
    try:
        return str(event) % args
    except Exception as error:  # arguments that do not fit
        return f"{event!s:.1000} [bad arguments: {type(error).__name__}]"


def _last_resort(error: BaseException) -> None:
    """Say on stderr that a line was lost, if even that is possible."""
    with contextlib.suppress(Exception):
        os.write(2, f"furlong: a log line was lost: {type(error).__name__}\n".encode())
