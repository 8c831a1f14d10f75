"""Runs a sink of the user's own (furlong/sinks.py) in its process. Only what the user's class raises passes from it."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any  # Any: the user's object, and JSON

from furlong.config import ConfigError
from furlong.hooks import load_hook
from furlong.sinks import wrong_class

KEY = "metrics.metrics_sink"


class UserSinkHost:
    """Awaits what is to be awaited, and gives the class rows of its own."""

    async def start(self, settings: Mapping[str, Any]) -> int | None:
        """Make the object and have it get ready. Raises ConfigError when the class is none."""
        path = settings["class"]
        found = load_hook(path, key=KEY)
        if problem := wrong_class(found, path, key=KEY):
            raise ConfigError([problem])
        self._sink = found()
        told = await self._call("init", settings["run"], settings["config"])
        return told if isinstance(told, int) and not isinstance(told, bool) else None

    async def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Hand the rows over."""
        await self._call("write", [_shown(row) for row in rows])

    async def flush(self) -> None:
        """After every write."""
        await self._call("flush")

    async def close(self) -> None:
        """At the end."""
        await self._call("close")

    async def _call(self, name: str, *given: object) -> object:
        method = getattr(self._sink, name, None)
        if method is None:
            return None
        result = method(*given)
        return await result if inspect.isawaitable(result) else result


def _shown(row: Mapping[str, Any]) -> dict[str, Any]:
    """The line of metrics.jsonl with its numbers as such (NaN is text there), and its place."""
    body = row["body"]
    values = {name: float(value) if isinstance(value, str) else value for name, value in body["values"].items()}
    return {**body, "values": values, "row": row["row"], "current": row["current"]}
