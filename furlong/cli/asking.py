"""What `furlong tail`, `query` and `alerts` share: their options, and where the answers come from."""

import contextlib
import difflib
import sys
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

from furlong.asking.client import MetricsClient, Refused, Unreachable
from furlong.asking.source import Found, Source, find
from furlong.asking.store import NoStore
from furlong.cli.arguments import take_options
from furlong.config import ConfigError
from furlong.config.errors import Problem
from furlong.process import ExitCode
from furlong.rundir import RunDir

WHERE = ("run-dir", "url")


@dataclass(frozen=True)
class Asked:
    """A command line, read."""

    options: dict[str, str]
    switches: frozenset[str]
    words: tuple[str, ...]


def read_command(arguments: Sequence[str], *, options: Sequence[str], switches: Sequence[str]) -> Asked:
    """Options with a value, switches, and other words. Raises ConfigError for what is none of these."""
    taken = take_options(arguments, (*WHERE, *options))
    given, words = set(), []
    for word in taken.rest:
        name = word.removeprefix("--")
        if not word.startswith("-"):
            words.append(word)
        elif word.startswith("--") and name in switches:
            given.add(name)
        else:
            near = difflib.get_close_matches(name, [*WHERE, *options, *switches], n=1)
            remedy = f"Did you mean --{near[0]}?" if near else "--help lists what is taken."
            raise ConfigError([Problem(word, "", "is not a flag of this command", remedy)])
    return Asked(taken.options, frozenset(given), tuple(words))


def refuse_words(asked: Asked) -> None:
    """For a command that takes none."""
    if asked.words:
        raise ConfigError([Problem("arguments", " ".join(asked.words), "are not taken", "--help lists what is.")])


def locate(asked: Asked) -> Callable[[], Found]:
    """How to find what answers, now or again later. Raises ConfigError."""
    url, folder = asked.options.get("url"), asked.options.get("run-dir")
    if bool(url) == bool(folder):
        rule = "exactly one of --run-dir and --url must be given"
        raise ConfigError([Problem("--run-dir", folder or "", rule, "For example --run-dir runs/arith.")])
    if url:
        try:
            client = MetricsClient(url)
        except ValueError as error:
            raise ConfigError([Problem("--url", url, str(error), "`furlong metrics` prints its address.")]) from None
        return lambda: Found(client, None, None)
    if not Path(str(folder)).is_dir():
        raise ConfigError([Problem("--run-dir", folder, f"must be a folder, seen from {Path.cwd()}")])
    return lambda: find(RunDir(Path(str(folder))))


def source_of(asked: Asked) -> tuple[Source, str | None]:
    """What answers, and the run to ask for; says on stderr when only the store is left. Raises what `find` does."""
    found = locate(asked)()
    source = Source(found)
    if source.is_dead:
        tell("no metrics service runs here; this is read from what it has stored")
    return source, asked.options.get("run", found.run)


@contextlib.contextmanager
def told_errors() -> Generator[list[int]]:
    """Errors of asking as a line on stderr; the list then holds the exit code."""
    code: list[int] = []
    try:
        yield code
    except Refused as error:
        tell(f"{error.error}. " + (f"Did you mean {', '.join(error.close)}?" if error.close else error.remedy))
        code.append(int(ExitCode.BAD_CONFIG))
    except NoStore as error:
        tell(str(error))
        code.append(int(ExitCode.BAD_CONFIG))
    except Unreachable as error:
        tell(str(error))
        code.append(int(ExitCode.PEER_LOST))


def tell(text: str) -> None:
    """A line for people, beside the answer."""
    with contextlib.suppress(OSError, ValueError):
        print(f"furlong: {text}", file=sys.stderr, flush=True)
