"""Calls to one engine's HTTP API, each with a limit, each failure saying which engine and which step.

Never retries: what a weight update does must not happen twice.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

Json = Mapping[str, Any]  # Any: JSON of SGLang's API


class EngineCallFailed(Exception):
    """An engine refused a call, or did not answer."""

    def __init__(
        self, engine_id: str, step: str, problem: str, *, status: int | None = None, too_late: bool = False
    ) -> None:
        self.engine_id = engine_id
        self.step = step
        self.problem = problem
        self.status = status
        """HTTP status. None: no answer (connection lost, or too late)."""
        self.too_late = too_late
        super().__init__(f"{engine_id}: {step} failed: {problem}")


@dataclass(frozen=True)
class EngineHttp:
    """The HTTP API of one engine."""

    session: aiohttp.ClientSession
    engine_id: str
    url: str

    async def post(self, path: str, body: Json, *, timeout_s: float) -> Any:  # Any: JSON of SGLang's API
        """The answer's JSON (None for a body that is not JSON). Raises EngineCallFailed on anything but 200."""
        return await self._call("POST", path, orjson.dumps(body), timeout_s)

    async def get(self, path: str, *, timeout_s: float) -> Any:  # Any: JSON of SGLang's API
        """As `post`, of what an engine tells."""
        return await self._call("GET", path, None, timeout_s)

    async def _call(self, method: str, path: str, body: bytes | None, timeout_s: float) -> Any:  # Any: JSON
        step = path.strip("/").split("?", 1)[0]
        try:
            async with self.session.request(
                method,
                f"{self.url}{path}",
                data=body,
                headers={"Content-Type": "application/json"} if body is not None else None,
                timeout=aiohttp.ClientTimeout(total=timeout_s),
            ) as response:
                content = await response.read()
        except TimeoutError:
            problem = f"no answer within {timeout_s:g} s"
            raise EngineCallFailed(self.engine_id, step, problem, too_late=True) from None
        except (aiohttp.ClientError, OSError) as error:
            problem = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise EngineCallFailed(self.engine_id, step, problem) from error
        answer = _parse(content)
        if response.status != 200:
            problem = f"HTTP {response.status}: {_message(answer, content)}"
            raise EngineCallFailed(self.engine_id, step, problem, status=response.status)
        if isinstance(answer, Mapping) and answer.get("success") is False:
            raise EngineCallFailed(self.engine_id, step, _message(answer, content), status=response.status)
        return answer


def _parse(content: bytes) -> Any:  # Any: JSON
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError:
        return None


def _message(answer: object, content: bytes) -> str:
    if isinstance(answer, Mapping):
        for value in (answer.get("message"), answer.get("error"), answer.get("detail")):
            if isinstance(value, Mapping):
                value = value.get("message")
            if isinstance(value, str):
                return value[:500]
    return content[:500].decode(errors="replace")
