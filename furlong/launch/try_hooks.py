"""Imports hooks and says what is wrong with them or their parameters: `python -m furlong.launch.try_hooks KEY=PATH`.

A process of its own, started by preflight, since importing a user's module may do anything: what it prints is not taken
for our answer, and its `sys.exit` is a fault. The answer is one JSON list on stdout: [[key, value, rule, remedy], ...].
"""

import json
import os
import sys

from furlong.config import ConfigError
from furlong.config.errors import Problem
from furlong.hooks import load_hook, wrong_arguments
from furlong.sinks import wrong_class

SINK_KEY = "metrics.metrics_sink"


def main(pairs: list[str]) -> int:
    """Answer on stdout; the exit code is 0 also when hooks are at fault."""
    answer = os.dup(1)
    os.dup2(2, 1)
    problems: list[Problem] = []
    for pair in pairs:
        key, _, path = pair.partition("=")
        try:
            judge = wrong_class if key == SINK_KEY else wrong_arguments
            problem = judge(load_hook(path, key=key), path, key=key)
            problems += [problem] if problem else []
        except ConfigError as error:
            problems += error.problems
        except SystemExit:
            problems.append(Problem(key, path, "must be importable, but its module ends the process when imported"))
    told = [[problem.key, problem.value, problem.rule, problem.remedy] for problem in problems]
    os.write(answer, json.dumps(told).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
