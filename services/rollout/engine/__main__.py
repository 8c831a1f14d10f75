"""`python -m services.rollout.engine`: read the flags, tie the leash, serve."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator, Sequence
from pathlib import Path

from services.rollout.engine.options import EngineOptions, parse_options

BAD_CONFIG = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the engine; returns the exit code."""
    options = parse_options(argv)

    from furlong.process import die_with_parent

    die_with_parent(options.parent_pid)
    with _logging(options):
        if not _check_model(options):
            return BAD_CONFIG
        from services.rollout.engine.server import serve

        return serve(options)


@contextlib.contextmanager
def _logging(options: EngineOptions) -> Generator[None]:
    """Lines on stderr; as part of a run in its log folder and at its metrics service too."""
    from furlong import logs
    from furlong.config import load_resolved
    from furlong.rundir import RunDir
    from furlong.telemetry import Telemetry

    run, path, telemetry = "", None, None
    if options.run_config is not None:
        config = load_resolved(options.run_config)
        run_dir = RunDir(Path(config.run.run_dir))
        run, path = config.run.name, run_dir.log(options.instance)
        telemetry = Telemetry.for_run(config, run_dir, service="engine", instance=options.instance)
    logs.configure(
        run=run,
        service="engine",
        instance=options.instance,
        level=options.log_level,
        path=path,
        to_stderr=True,
        telemetry=telemetry,
    )
    try:
        yield
    finally:
        if telemetry is not None:
            telemetry.close(timeout_s=1.0)


def _check_model(options: EngineOptions) -> bool:
    """Refuse a model before the seconds that importing torch takes."""
    import structlog

    from services.rollout.engine.architecture import UnsupportedModelError, load_config

    try:
        load_config(Path(options.model_path))
    except UnsupportedModelError as error:
        structlog.get_logger().error("engine_refused", model_path=options.model_path, error=str(error))
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
