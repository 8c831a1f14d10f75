"""`furlong sinks`: which sinks a metrics service has, how far each is, and adding and removing them while it runs."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any  # Any: the service's JSON
from urllib.parse import quote

import orjson

from furlong.asking.client import MetricsClient, Unreachable
from furlong.cli.asking import Asked, locate, read_command, told_errors
from furlong.cli.sink_lines import sink_line
from furlong.config import ConfigError
from furlong.config.errors import Problem

HELP = """usage: furlong sinks [list] (--run-dir DIR | --url URL) [--json]
       furlong sinks add KIND --name NAME [--option KEY=VALUE]... (--run-dir DIR | --url URL)
       furlong sinks remove NAME [--keep-cursor] (--run-dir DIR | --url URL)
       furlong sinks restore NAME (--run-dir DIR | --url URL)

Show where the rows of a running metrics service go, and add or remove a sink while it runs. One that is added gets
every row from the first on, and is there again after a restart. One of a flag that was removed can be restored: it goes
on where it was, and also comes back with the service's next start.

  KIND           jsonl, mlflow, otlp, otlp_logs, statsd, tensorboard, wandb, webhook
  --name NAME    a name of your choice
  --option K=V   what the kind takes, for example url=http://127.0.0.1:9000/rows; the value is text unless it is a JSON
                 number, true or false. Secrets come from the service's environment, never from here
  --keep-cursor  added again under its name, it goes on where it was; else it gets every row once more
  --run-dir DIR  the run's directory
  --url URL      the metrics service, for example http://127.0.0.1:8660
  --json         as JSON

Examples
  furlong sinks --run-dir runs/arith
  furlong sinks add tensorboard --name board --option dir=board --run-dir runs/arith
  furlong sinks remove board --run-dir runs/arith

Exits 0; 2 when it is refused, 5 when the service does not answer.
"""


def sinks(arguments: Sequence[str]) -> int:
    """Do it, and print what there is then. Raises ConfigError."""
    if "-h" in arguments or "--help" in arguments:
        print(HELP, end="")
        return 0
    options, rest = _take_sink_options(arguments)
    asked = read_command(rest, options=("name",), switches=("json", "keep-cursor"))
    verb, *words = asked.words or ("list",)
    with told_errors() as code:
        found = locate(asked)()
        if not isinstance(found.client, MetricsClient):
            raise Unreachable("no metrics service runs here: sinks are asked for and changed while it does")
        if verb == "list" and not words:
            _show(found.client, as_json="json" in asked.switches)
        elif verb == "add":
            _add(found.client, asked, words, options)
        elif verb == "remove" and len(words) == 1:
            keep = "keep-cursor" in asked.switches
            found.client.send("DELETE", f"/api/sinks/{quote(words[0], safe='')}", {"keep_cursor": keep})
            print(f"removed {words[0]}")
        elif verb == "restore" and len(words) == 1:
            found.client.send("POST", f"/api/sinks/{quote(words[0], safe='')}/restore")
            print(f"restored {words[0]}")
        else:
            rule = "is not what this command takes"
            raise ConfigError(
                [Problem("arguments", " ".join(asked.words), rule, "`furlong sinks --help` says what is.")]
            )
        sys.stdout.flush()
    return code[0] if code else 0


def _show(client: MetricsClient, *, as_json: bool) -> None:
    listed = client.get("/api/sinks")["sinks"]
    if as_json:
        print(orjson.dumps(listed, option=orjson.OPT_INDENT_2).decode())
        return
    for sink in listed:
        origin = "added while running" if sink["live"] else "by flag"
        print(f"{sink['name']} ({sink['kind']}, {origin}){_options(sink['options'])}")
        for task in sink["tasks"]:
            print(f"  {sink_line(task)}")


def _add(client: MetricsClient, asked: Asked, words: Sequence[str], options: Mapping[str, Any]) -> None:
    name = asked.options.get("name")
    if len(words) != 1 or not name:
        rule = "needs one KIND and --name NAME"
        raise ConfigError([Problem("sinks add", " ".join(words), rule, "`furlong sinks --help` lists the kinds.")])
    client.send("POST", "/api/sinks", body={"name": name, "kind": words[0], "options": options})
    print(f"added {name}")


def _take_sink_options(arguments: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """The --option pairs, and the other words."""
    options: dict[str, Any] = {}
    rest: list[str] = []
    words = iter(arguments)
    for word in words:
        if word == "--option" or word.startswith("--option="):
            pair = word.partition("=")[2] if "=" in word else next(words, "")
            key, equals, value = pair.partition("=")
            if not key or not equals:
                raise ConfigError([Problem("--option", pair, "must be KEY=VALUE", "For example --option dir=board.")])
            options[key] = _value(value)
        else:
            rest.append(word)
    return options, rest


def _value(text: str) -> Any:
    try:
        found = orjson.loads(text)
    except ValueError:
        return text
    return found if isinstance(found, int | float | bool) else text


def _options(options: Mapping[str, Any]) -> str:
    shown = " ".join(f"{key}={value}" for key, value in options.items() if value != "" and not isinstance(value, dict))
    return f": {shown}" if shown else ""
