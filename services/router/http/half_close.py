"""Whether a client that ended its sending has left, or only half closed its connection and waits for its answer.

Both look the same until something is sent: who is gone answers it with a reset. So it is sent bytes without a meaning.
"""

import asyncio
import sys

from services.router.http.tcp import is_closed

PROCESSING = b"HTTP/1.1 102 Processing\r\n\r\n"
"""An interim answer, which clients of HTTP/1.1 pass over."""
LEADING_ZERO = b"0"
"""The first digit of the size of the next chunk."""
_LOOK_S = (0.001, 0.005, 0.01, 0.02, 0.05)
"""When to look whether the reset came; then as often as the last."""


def find_out(transport: asyncio.Transport, *, begun: bool, half_chunk: bool, http_10: bool) -> bool:
    """Whether the connection may still be read by its client. If it turns out not to be, it is aborted.

    begun: the answer's head was sent; half_chunk: its body goes out in chunks. A client of HTTP/1.0 knows neither
    chunks nor interim answers, and counts as gone.
    """
    if sys.platform != "linux" or http_10:
        return False
    if not begun:
        transport.write(PROCESSING)
    elif half_chunk:
        transport.write(LEADING_ZERO)
    asyncio.get_running_loop().call_later(_LOOK_S[0], _look, transport, 0)
    return True


def _look(transport: asyncio.Transport, times: int) -> None:
    if transport.is_closing():
        return
    if is_closed(transport.get_extra_info("socket")):
        transport.abort()
        return
    times = min(times + 1, len(_LOOK_S) - 1)
    asyncio.get_running_loop().call_later(_LOOK_S[times], _look, transport, times)
