"""Waiting for something to become true, with a limit."""

import asyncio
from collections.abc import Callable


async def eventually(true: Callable[[], bool], what: str, *, timeout_s: float = 10.0) -> None:
    """Return once `true()` is; fail after timeout_s seconds saying what was awaited."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not true():
        assert asyncio.get_running_loop().time() < deadline, f"not within {timeout_s:g} s: {what}"
        await asyncio.sleep(0.005)
