"""Ties a program that we did not write to its parent: `python -m services.rollout.leash PARENT_PID PROGRAM ARGS...`.

The kernel kills the program when the parent ends, however it ends. Replaces itself with the program, so that its pid,
output and exit status are the program's own.
"""

import os
import sys

from furlong.process import die_with_parent


def main(arguments: list[str]) -> None:
    """Put the leash on and become the program."""
    parent_pid, program, *rest = arguments
    die_with_parent(int(parent_pid))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # of our environment
    os.execve(program, [program, *rest], environment)


if __name__ == "__main__":
    main(sys.argv[1:])
