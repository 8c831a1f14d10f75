"""The process of one sink: reads questions as JSON lines on stdin, answers each on stdout, ends with its stdin.

The class that does the work has `start(settings) -> int | None` (the last row that is safe on the other side, if it can
tell), `write(rows)`, `flush()` and `close()`. The last two may be missing; each may be async. What was written counts
as safe once `flush`, called after each write, has returned; each of the three may return another row that is safe.
Everything that the process or its libraries print goes to a log, and nothing of it is an answer.
"""

import asyncio
import contextlib
import fcntl
import importlib
import json
import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any  # Any: the class, and JSON

from furlong.sinks import Refused

MAX_ERROR_CHARS = 2_000
WATCH_S = 0.5
STUCK_S = 300.0
"""A process whose interpreter does not come to run the watching thread for so long is ended by the kernel."""
OOM_SCORE = 500
NICE = 5


def main() -> int:
    """Answer until stdin ends."""
    questions, answers = _own_channels()
    number, _, line = questions.readline().partition(b" ")
    if not line.endswith(b"\n"):
        return 0
    begin = json.loads(line)
    _Leash(begin["parent"], finish_s=begin["finish_s"], memory_bytes=begin["memory_bytes"]).start()
    settings = begin["start"]
    with _only_one(Path(settings["folder"]) / "process.lock"), asyncio.Runner() as runner:
        served = Served(runner, Path(settings["folder"]))
        answer = served.start(begin["child"], settings)
        _answer(answers, number, answer)
        if "error" in answer:
            return 1
        return _serve(served, questions, answers)


def _serve(served: "Served", questions: IO[bytes], answers: IO[bytes]) -> int:
    asked = b""
    while line := questions.readline():
        if not line.endswith(b"\n"):
            break  # the service was killed in the middle
        asked, _, body = line.partition(b" ")
        question = json.loads(body)
        if "finish" in question:
            break
        _answer(answers, asked, served.answer(question))
    finished = served.finish()
    _answer(answers, asked, finished)
    return 1 if "error" in finished else 0


class Served:
    """The object that does the work, and what it has taken."""

    def __init__(self, runner: asyncio.Runner, folder: Path) -> None:
        self._runner, self._marker = runner, folder / "finished"
        self._object: Any = None
        self._through = self._safe = 0
        self._refused: list[tuple[int, str]] = []
        """Not told yet."""

    def start(self, path: str, settings: Mapping[str, Any]) -> dict[str, Any]:
        try:
            module, _, name = path.rpartition(".")
            self._object = getattr(importlib.import_module(module), name)()
            finished = min(self._finished_earlier(), settings["last_row"])
            told = self._call(self._object.start, {**settings, "finished_row": finished})
        except (Exception, SystemExit) as error:  # whatever a vendor or a user raises: told, and tried again
            return _error(error)
        if told is None or int(told) > settings["last_row"]:  # it speaks of another durable log's rows
            told = max(settings["durable_row"], finished)
        self._through = self._safe = int(told)
        return {"ready": self._safe}

    def answer(self, question: Mapping[str, Any]) -> dict[str, Any]:
        try:
            if "rows" in question:
                return self._write([_row(row) for row in question["rows"]])
            if "call" in question:
                self._call(getattr(self._object, question["call"]), question["given"])
                return {}
            self._flush()
            return self._told()
        except (Exception, SystemExit) as error:
            return _error(error)

    def finish(self) -> dict[str, Any]:
        """Close, and leave a note of how far it came, for who starts after the service was killed."""
        try:
            if hasattr(self._object, "close"):
                told = self._call(self._object.close)
                self._safe = self._through if told is None else int(told)
            else:
                self._flush()
        except (Exception, SystemExit) as error:
            return _error(error)
        _remember(self._marker, str(self._safe))
        return {"finished": self._safe}

    def _write(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        last = rows[-1]["row"] if rows else self._through
        told: object = None
        rows = [row for row in rows if row["row"] > self._through]  # the same again, after an error further on
        while rows:
            try:
                told = self._call(self._object.write, rows)
                break
            except Refused as one:
                if one.row_id not in [row["row"] for row in rows]:
                    raise ValueError(f"it refused row {one.row_id}, which it was not given") from one
                self._refused.append((one.row_id, one.reason[:MAX_ERROR_CHARS]))
                self._through = one.row_id  # those before it are taken, whatever becomes of the rest
                rows = [row for row in rows if row["row"] > one.row_id]
        self._through = last
        if isinstance(told, int):
            self._safe = told
        else:
            self._flush()
        refused, self._refused = self._refused, []
        return {**self._told(), **({"refused": refused} if refused else {})}

    def _told(self) -> dict[str, Any]:
        trouble = str(getattr(self._object, "trouble", ""))[:MAX_ERROR_CHARS]
        return {"safe": self._safe, **({"trouble": trouble} if trouble else {})}

    def _flush(self) -> None:
        told = self._call(self._object.flush) if hasattr(self._object, "flush") else None
        self._safe = self._through if told is None else int(told)

    def _call(self, method: Any, *given: object) -> Any:
        result = method(*given)
        return self._runner.run(result) if asyncio.iscoroutine(result) else result

    def _finished_earlier(self) -> int:
        try:
            return int(self._marker.read_text())
        except (OSError, ValueError):
            return 0


def _row(row: dict[str, Any]) -> dict[str, Any]:
    """With NaN and the infinities, which JSON holds as text, as numbers."""
    row["values"] = {name: float(v) if isinstance(v, str) else v for name, v in row["values"].items()}
    return row


def _error(error: BaseException) -> dict[str, Any]:
    traceback.print_exception(error)
    sys.stderr.flush()
    return {"error": f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS]}


def _own_channels() -> tuple[IO[bytes], IO[bytes]]:
    """Our pipes under numbers that nobody else knows: what is printed is no answer, what is read no question."""
    questions, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return questions, answers


def _answer(answers: IO[bytes], number: bytes, answer: Mapping[str, Any]) -> None:
    with contextlib.suppress(OSError):  # the service may be gone: we finish all the same
        answers.write(number + b" " + json.dumps(answer).encode() + b"\n")


def _remember(path: Path, text: str) -> None:
    scratch = path.with_name(f".{path.name}.new")
    with scratch.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(scratch, path)


class _Leash(threading.Thread):
    """Ends the process when it outlives the service by more than its time to finish, or eats too much memory.

    The kernel's alarm does the ending: it works also when the interpreter is stuck in foreign code.
    """

    def __init__(self, parent: int, *, finish_s: float, memory_bytes: int) -> None:
        super().__init__(name="leash", daemon=True)
        self._parent, self._finish_s, self._memory_bytes = parent, finish_s, memory_bytes
        self._page = resource.getpagesize()
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        with contextlib.suppress(OSError):
            os.nice(NICE)
            Path("/proc/self/oom_score_adj").write_text(str(OOM_SCORE))  # of all of the run, it goes first
        if memory_bytes:
            _, hard = resource.getrlimit(resource.RLIMIT_DATA)
            limit = memory_bytes if hard == resource.RLIM_INFINITY else min(memory_bytes, hard)
            resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))

    def run(self) -> None:
        while os.getppid() == self._parent:
            signal.setitimer(signal.ITIMER_REAL, STUCK_S)
            self._check_memory()
            time.sleep(WATCH_S)
        signal.setitimer(signal.ITIMER_REAL, self._finish_s)

    def _check_memory(self) -> None:
        if not self._memory_bytes:
            return
        with contextlib.suppress(OSError, ValueError, IndexError):
            resident = int(Path("/proc/self/statm").read_text().split()[1]) * self._page
            if resident > self._memory_bytes:
                os.write(2, b"ended: it took %d bytes of memory, at most %d\n" % (resident, self._memory_bytes))
                os._exit(1)


class _only_one:
    """Held while the process works: one whose service was killed may still be finishing."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        self._file = self._path.open("w")
        fcntl.flock(self._file, fcntl.LOCK_EX)  # the leash of the other, and our own start limit, bound the wait

    def __exit__(self, *error: object) -> None:
        self._file.close()


if __name__ == "__main__":
    sys.exit(main())
