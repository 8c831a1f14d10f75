"""Sinks of a user's own, good and bad. They write to the file that OWN_SINK names."""

import abc
import asyncio
import json
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any


class Good:
    """All four methods."""

    def init(self, run: str, config: Mapping[str, Any]) -> None:
        self.tell({"init": run, "lr": config["trainer"]["lr"], "webhook": config["metrics"]["alert_webhook"]})

    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        for row in rows:
            self.tell({"row": row["row"], "step": row["step"], "loss": str(row["values"]["train/loss"])})

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.tell({"closed": True})

    def tell(self, said: object) -> None:
        with open(f"{os.environ['OWN_SINK']}.{type(self).__name__}", "a") as file:
            file.write(json.dumps(said) + "\n")


class OnlyWrite:
    """The least there can be; asynchronous."""

    async def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        await asyncio.sleep(0)
        for row in rows:
            Good.tell(self, {"step": row["step"], "is_nan": math.isnan(row["values"]["train/loss"])})  # type: ignore[arg-type]


class Raising(Good):
    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        raise ValueError("never")


class Hanging(Good):
    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        time.sleep(600)


class Printing(Good):
    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        print("{}" * 100_000)
        os.write(1, b"\n\n7 {}\n")
        super().write(rows)


class Exiting(Good):
    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        os._exit(0)


class Leaving(Good):
    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        sys.exit(0)


class Greedy(Good):
    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self.eaten = [bytearray(1024 * 1024) for _ in range(100_000)]


class Mutating(Good):
    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        super().write(rows)
        for row in rows:
            row.clear()  # type: ignore[attr-defined]


class NoWrite:
    def init(self, run: str, config: Mapping[str, Any]) -> None:
        pass


class WrongInit(Good):
    def init(self, config: Mapping[str, Any]) -> None:  # type: ignore[override]
        pass


class WrongWrite(Good):
    def write(self) -> None:  # type: ignore[override]
        pass


class NeedsArguments(Good):
    def __init__(self, url: str) -> None:
        pass


class Abstract(abc.ABC):
    @abc.abstractmethod
    def write(self, rows: Sequence[Mapping[str, Any]]) -> None: ...


class Yielding:
    def write(self, rows: Sequence[Mapping[str, Any]]) -> Any:
        yield rows


def function(rows: object) -> None:
    """No class."""


instance = Good()
