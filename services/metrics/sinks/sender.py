"""Sends what a sink has, piece by piece in order: halves what is refused, says how far it came when it cannot go on.

Never decides how a piece looks on the wire, nor when it is tried again.
"""

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from services.metrics.sinks.post import PostFailed, Unacceptable
from services.metrics.sinks.sink import Cursor, Refused, TakenInPart

Item = TypeVar("Item")

WRITE_TIMEOUT_S = 600.0
"""Of a write that sends; each POST has its own limit."""
LONGEST_S = 400.0
"""Then no further piece is begun, so that what was taken is remembered before the write is cut short."""


class Sender(Generic[Item]):
    """One POST at a time."""

    def __init__(
        self,
        post: Callable[[Sequence[Item]], Awaitable[None]],
        *,
        id_of: Callable[[Item], int],
        cursor_at: Callable[[Item], Cursor],
    ) -> None:
        """post: raises Unacceptable for what is refused for good, anything else when it is to be tried again.

        cursor_at: once an item and all before it were taken.
        """
        self._post, self._id_of, self._cursor_at = post, id_of, cursor_at
        self.took_any = False
        """The other side has ever taken something. Until then a refusal of everything may mean a wrong address."""

    async def send(self, pieces: Sequence[Sequence[Item]]) -> tuple[Refused, ...]:
        """All of them; those that were refused. Raises TakenInPart, or when nothing was taken what `post` raised."""
        left, refused = list(reversed(pieces)), list[Refused]()
        done: Item | None = None
        refusal: Unacceptable | None = None
        began_s = time.monotonic()
        try:
            while left:
                if done is not None and time.monotonic() - began_s > LONGEST_S:
                    raise PostFailed(f"it did not take all of a write within {LONGEST_S:g} s")
                piece = left.pop()
                try:
                    await self._post(piece)
                    self.took_any = True
                except Unacceptable as error:
                    refusal, middle = error, len(piece) // 2
                    if middle:
                        left += [piece[middle:], piece[:middle]]
                        continue
                    refused.append(Refused(self._id_of(piece[0]), str(error)))
                done = piece[-1]
        except Exception as error:  # whatever stops it: what was taken stays taken
            if done is None or not self.took_any:
                raise
            cursor = self._cursor_at(done)
            raise TakenInPart(Cursor(cursor.row_id, cursor.position, tuple(refused))) from error
        if refusal is not None and not self.took_any:
            raise PostFailed(f"{refusal} (everything so far; nothing is left out before it has taken something)")
        return tuple(refused)
