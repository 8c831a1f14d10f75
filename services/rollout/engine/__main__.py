"""`python -m services.rollout.engine`: read the flags, tie the leash, serve."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from services.rollout.engine.options import parse_options


def main(argv: Sequence[str] | None = None) -> int:
    """Run the engine; returns the exit code."""
    options = parse_options(argv)

    from furlong.process import die_with_parent
    from services.rollout.engine.logs import configure

    die_with_parent(options.parent_pid)
    configure(instance=options.instance, level=options.log_level)

    from services.rollout.engine.server import serve

    return serve(options)


if __name__ == "__main__":
    sys.exit(main())
