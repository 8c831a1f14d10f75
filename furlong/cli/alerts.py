"""`furlong alerts`: what fired and what still does."""

import os
import sys
from collections.abc import Sequence

import orjson

from furlong.cli.arguments import whole_number
from furlong.cli.asking import read_command, refuse_words, source_of, told_errors
from furlong.cli.lines import Style, alert_line

DEFAULT_LAST = 50
HELP = f"""usage: furlong alerts (--run-dir DIR | --url URL) [--run R] [--firing] [--last N] [--json]

Show the red flags of a run, oldest first: when each began (FIRING) or ceased (RESOLVED) to fire, what was seen, and
what to do. Works on a run that has ended, too.

  --run-dir DIR  the run's directory
  --url URL      the metrics service, for example http://127.0.0.1:8660; shows all its runs
  --run R        of this run only
  --firing       only what fires now
  --last N       how many changes ({DEFAULT_LAST})
  --json         one JSON object a line, with the evidence

Exits 0, also when nothing fired; 2 when there is no such run, 5 when the service does not answer.
"""


def alerts(arguments: Sequence[str]) -> int:
    """Print them. Raises ConfigError."""
    if "-h" in arguments or "--help" in arguments:
        print(HELP, end="")
        return 0
    asked = read_command(arguments, options=("run", "last"), switches=("firing", "json"))
    refuse_words(asked)
    last = whole_number(asked.options, "last")
    with told_errors() as code:
        source, run = source_of(asked)
        firing = True if "firing" in asked.switches else None
        found = source.alerts(run=run, firing=firing, last=last or DEFAULT_LAST)
        with_run = run is None and "url" in asked.options
        style = Style(colours=sys.stdout.isatty() and "NO_COLOR" not in os.environ)
        for alert in found:
            print(
                orjson.dumps(alert).decode()
                if "json" in asked.switches
                else alert_line(alert, style, with_run=with_run)
            )
        if not found and "json" not in asked.switches:
            print("nothing fires" if firing else "nothing has fired")
        sys.stdout.flush()
    return code[0] if code else 0
