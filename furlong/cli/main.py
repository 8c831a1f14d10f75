"""The entry of the command `furlong`: finds the command, runs it, and turns errors into lines and exit codes.

Imports nothing but the standard library before it knows which command is wanted.
"""

import contextlib
import sys
from collections.abc import Callable, Generator, Sequence

HELP = """\
Furlong post-trains language models with reinforcement learning: a trainer, a rollout, a router and a metrics
service, each a process of its own.

usage: furlong COMMAND [--config FILE] [flags]

Run everything on this machine
  up        start the four services, watch them, and stop them together; resumes a run directory it has been given
            before. Ctrl-C once: finish the iteration, save, stop. Twice: stop at once.

Look
  config    print the resolved run as TOML, and start nothing
  status    what of a run is up: pids, addresses, rollout, policy version, last checkpoint
  tail      log lines, rows and alerts of all services, live, with filters
  query     how a key went over the steps: furlong query train/loss --run-dir runs/short
  alerts    which red flags fired, and which still do
  sinks     where the rows go and how far each place is; add and remove one while the service runs

Run one service by hand, or under systemd
  metrics   takes in every log line and number, and hands rows to files, wandb and dashboards; with --port P and no
            --config it runs alone, for many runs and for whatever posts JSON lines
  router    the HTTP proxy in front of the engines; with --port P and no --config it runs alone, before any SGLang fleet
  rollout   prompts, sampling, rewards, evaluation, and the engines themselves
  trainer   the policy, its optimiser and the training loop (--rank N for one of several)

  version   print the version

Examples
  furlong up --config examples/arithmetic/config.toml
  furlong up --config examples/arithmetic/config.toml --num-rollout 5 --run-dir runs/short
  furlong status --run-dir runs/short
  furlong tail --run-dir runs/short --level warning
  furlong metrics --port 8660 --dir kept
  furlong router --port 30000 --worker-urls http://10.0.0.5:30000 http://10.0.0.6:30000
  furlong config --config examples/arithmetic/config.toml --lr 3e-4
  furlong up --help          every flag, with its default

Flags win over the file, the file over the defaults. Exit codes: 0 done, 1 crashed, 2 refused (configuration),
3 stopped as asked with a checkpoint, 4 diverged, 5 a service that was needed went away, 6 stopped at once,
7 stopped for an alert that --halt-on names, with a checkpoint.
"""

Command = Callable[[Sequence[str]], int]
LOOKING = ("up", "config", "status", "tail", "query", "alerts", "sinks")
SERVICES = ("metrics", "router", "rollout", "trainer")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help", "help"):
        print(HELP, end="")
        return 0 if words else 2
    name, *rest = words
    command = _find(name)
    if command is None:
        print(f"furlong has no command {name!r}.{_closest(name)} `furlong --help` lists them.", file=sys.stderr)
        return 2
    return command(rest) if command is _version else _guarded(command, rest)


def _find(name: str) -> Command | None:
    """The command, with only what it needs imported."""
    if name == "up":
        from furlong.cli.up import up

        return up
    if name == "config":
        from furlong.cli.show_config import show_config

        return show_config
    if name == "status":
        from furlong.cli.status import status

        return status
    if name == "tail":
        from furlong.cli.tail import tail

        return tail
    if name == "query":
        from furlong.cli.query import query

        return query
    if name == "alerts":
        from furlong.cli.alerts import alerts

        return alerts
    if name == "sinks":
        from furlong.cli.sinks import sinks

        return sinks
    if name in SERVICES:
        with _without_rich():
            from furlong.cli.one_service import run_service

        return lambda arguments: run_service(name, arguments)
    return _version if name in ("version", "--version") else None


@contextlib.contextmanager
def _without_rich() -> Generator[None]:
    """structlog imports rich where it is installed, for colours that no service prints: 4 MB of each process."""
    had = sys.modules.get("rich")
    sys.modules["rich"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["rich"]
        if had is not None:
            sys.modules["rich"] = had


def _version(arguments: Sequence[str]) -> int:
    from furlong import __version__

    print(f"furlong {__version__}")
    return 0


def _guarded(command: Command, arguments: Sequence[str]) -> int:
    from furlong.config import ConfigError
    from furlong.config.errors import refusal

    try:
        return command(arguments)
    except ConfigError as error:
        print(refusal(str(error)), file=sys.stderr)
        return 2
    except BrokenPipeError:  # `furlong config | head`: who read us has enough
        sys.stderr.close()
        return 0


def _closest(name: str) -> str:
    import difflib

    close = difflib.get_close_matches(name, [*LOOKING, *SERVICES, "version"], n=1)
    return f" Did you mean `furlong {close[0]}`?" if close else ""
