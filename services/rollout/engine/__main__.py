"""`python -m services.rollout.engine`: read the flags, tie the leash, serve."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from services.rollout.engine.options import EngineOptions, parse_options

BAD_CONFIG = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the engine; returns the exit code."""
    options = parse_options(argv)

    from furlong.process import die_with_parent
    from services.rollout.engine.logs import configure

    die_with_parent(options.parent_pid)
    configure(instance=options.instance, level=options.log_level)

    if not _check_model(options):
        return BAD_CONFIG
    from services.rollout.engine.server import serve

    return serve(options)


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
