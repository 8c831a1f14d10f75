"""Classes for sinks/process_main.py that misbehave, each in its own way. What they do stands in files."""

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from furlong.sinks import Refused


class Recording:
    """Writes each row's number to a file."""

    def start(self, settings: dict[str, Any]) -> int | None:
        self.folder = Path(settings["folder"])
        self.settings = settings
        with (self.folder / "starts").open("a") as file:
            file.write(json.dumps(settings) + "\n")
        return None

    def write(self, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            self.take(row)

    def take(self, row: dict[str, Any]) -> None:
        with (self.folder / "rows").open("a") as file:
            file.write(f"{row['row']}\n")

    def once(self, word: str) -> bool:
        """True the first time."""
        try:
            (self.folder / word).open("x").close()
        except FileExistsError:
            return False
        return True

    def close(self) -> None:
        (self.folder / "closed").touch()


class Chatty(Recording):
    """Prints on stdout and asks stdin."""

    def take(self, row: dict[str, Any]) -> None:
        print("1 {}\ngarbage")
        os.write(1, b"\xff\xfe no answer\n")
        assert sys.stdin.read() == ""
        super().take(row)


class Leaving(Recording):
    """Ends the process at row 3, once."""

    def take(self, row: dict[str, Any]) -> None:
        if row["row"] == 3 and self.once("left"):
            os._exit(7)
        super().take(row)


class Exiting(Recording):
    """sys.exit at row 3, once."""

    def write(self, rows: list[dict[str, Any]]) -> None:
        if self.once("exited"):
            sys.exit("no")
        super().write(rows)


class Raising(Recording):
    """Raises at every second try."""

    tries = 0

    def write(self, rows: list[dict[str, Any]]) -> None:
        self.tries += 1
        if self.tries % 2:
            raise BrokenPipeError(32, "broken pipe")
        super().write(rows)


class Hanging(Recording):
    """Never comes back from the first write."""

    def write(self, rows: list[dict[str, Any]]) -> None:
        if self.once("hung"):
            time.sleep(600)
        super().write(rows)


class Stubborn(Recording):
    """Cannot be closed."""

    def close(self) -> None:
        time.sleep(600)


class Greedy(Recording):
    """Takes all the memory it can get, once."""

    def take(self, row: dict[str, Any]) -> None:
        if self.once("ate"):
            eaten = []
            while True:
                eaten.append(bytearray(64 * 1024 * 1024))
        super().take(row)


class Choosy(Recording):
    """Refuses rows that 3 divides."""

    def write(self, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            if row["row"] % 3 == 0:
                raise Refused(row["row"], "three divides it")
            self.take(row)


class ChoosyAndRaising(Choosy):
    """Raises after it refused row 3, once."""

    def take(self, row: dict[str, Any]) -> None:
        if row["row"] == 4 and self.once("raised"):
            raise ConnectionError("away")
        super().take(row)


class Absurd(Recording):
    """Refuses a row that it was not given, once."""

    def write(self, rows: list[dict[str, Any]]) -> None:
        if self.once("refused"):
            raise Refused(rows[-1]["row"] + 1, "why not")
        super().write(rows)


class Ending(Recording):
    """Notes how runs ended; while a file `down` lies in its folder, it cannot."""

    def identify(self, given: dict[str, str]) -> None:
        self.known = getattr(self, "known", {}) | given

    def ended(self, given: dict[str, str]) -> None:
        if (self.folder / "down").exists():
            raise ConnectionError("down")
        assert set(given) <= set(self.known)
        with (self.folder / "ended").open("a") as file:
            file.write(json.dumps(given) + "\n")


class Mutating(Recording):
    """Changes what it is given."""

    def take(self, row: dict[str, Any]) -> None:
        super().take(row)
        row["body"].clear()
        row.clear()


class Async(Recording):
    """Everything is a coroutine."""

    async def start(self, settings: dict[str, Any]) -> int | None:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().start(settings)

    async def write(self, rows: list[dict[str, Any]]) -> None:  # type: ignore[override]
        await asyncio.sleep(0)
        super().write(rows)

    async def flush(self) -> None:
        await asyncio.sleep(0)

    async def close(self) -> None:  # type: ignore[override]
        super().close()


class Knowing(Recording):
    """The other side knows what it has."""

    def start(self, settings: dict[str, Any]) -> int | None:
        super().start(settings)
        path = self.folder / "rows"
        return int(path.read_text().split()[-1]) if path.exists() else 0


class Unstartable(Recording):
    """Cannot get ready."""

    def start(self, settings: dict[str, Any]) -> int | None:
        raise OSError("no route")


class Dying(Recording):
    """The interpreter itself dies."""

    def take(self, row: dict[str, Any]) -> None:
        if self.once("died"):
            os.kill(os.getpid(), 11)
        super().take(row)
