"""/api/sinks: which sinks there are, and adding, removing and restoring them while it runs."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Body, Response
from pydantic import BaseModel, ConfigDict, Field

from furlong.config import ConfigError
from services.metrics.http.errors import Problem
from services.metrics.sinks.manager import SinkManager, UnknownSink
from services.metrics.sinks.sink import SinkSpec

if TYPE_CHECKING:
    from services.metrics.sinks.manager import ListedSink


_NEW = {"name": "board", "kind": "tensorboard", "options": {"dir": "tensorboard"}}


class NewSink(BaseModel):
    """A sink to add."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=128)
    """A name of your choice."""
    kind: str = Field(max_length=64)
    """For example tensorboard or webhook."""
    options: dict[str, Any] = {}  # Any: what the kind takes
    """What the kind takes."""


def router(sinks: SinkManager) -> APIRouter:
    """The routes."""
    routes = APIRouter(prefix="/api/sinks", tags=["sinks"])

    @routes.get("", summary="The sinks, and how far each is")
    async def listed() -> dict[str, object]:
        """Options that are secret are masked."""
        return {"sinks": [_form(sink) for sink in await sinks.listed()]}

    @routes.post("", status_code=201, summary="Add a sink")
    async def add(sink: Annotated[NewSink, Body(examples=[_NEW])]) -> dict[str, object]:
        """It is kept: the service has it at its next start too. It gets every row that the store still has."""
        try:
            await sinks.add(SinkSpec(sink.name, sink.kind, sink.options))
        except ConfigError as error:
            raise _refusal(400, error, "GET /docs says what is taken.") from None
        return {"sinks": [_form(known) for known in await sinks.listed() if known.name == sink.name]}

    @routes.post("/{name}/restore", summary="Start a removed sink of a flag again")
    async def restore(name: str) -> dict[str, object]:
        """It goes on where it was when it was removed."""
        try:
            await sinks.restore(name)
        except UnknownSink:
            said = f"no sink {name[:100]!r} of a flag was removed"
            raise Problem(404, said, "GET /api/sinks lists those at work; POST /api/sinks adds one.") from None
        except ConfigError as error:
            raise _refusal(409, error, "GET /api/sinks lists those at work.") from None
        return {"sinks": [_form(known) for known in await sinks.listed() if known.name == name]}

    @routes.delete("/{name}", status_code=204, summary="Remove a sink")
    async def remove(name: str, keep_cursor: bool = False) -> Response:
        """What it has taken stays where it is; how far it was is forgotten, unless keep_cursor is true. One that a flag
        names can be restored, comes back with the next start, and goes on where it was."""
        try:
            await sinks.remove(name, keep_cursor=keep_cursor)
        except UnknownSink:
            known = ", ".join([known.name for known in await sinks.listed()])
            raise Problem(404, f"there is no sink {name[:100]!r}", f"There are: {known}.") from None
        except ConfigError as error:
            raise _refusal(409, error, "Change the flags.") from None
        return Response(status_code=204)

    return routes


def _refusal(status: int, error: ConfigError, otherwise: str) -> Problem:
    """The first fault, its remedy apart."""
    first = error.problems[0]
    said = str(dataclasses.replace(first, remedy="")).removesuffix(".")
    return Problem(status, said, first.remedy or otherwise)


def _form(sink: "ListedSink") -> Mapping[str, object]:
    return dataclasses.asdict(sink)
