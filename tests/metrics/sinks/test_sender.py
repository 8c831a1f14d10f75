"""What sends pieces says how far it came, whatever stops it."""

from collections.abc import Sequence

import pytest

from services.metrics.sinks import sender as module
from services.metrics.sinks.post import PostFailed, Unacceptable
from services.metrics.sinks.sender import Sender
from services.metrics.sinks.sink import Cursor, TakenInPart


def sender_of(fates: dict[int, Exception], sent: list[int]) -> Sender[int]:
    """A number that has a fate has it for any piece that it is in."""

    async def post(numbers: Sequence[int]) -> None:
        for number in numbers:
            if number in fates:
                raise fates[number]
        sent.extend(numbers)

    return Sender(post, id_of=lambda number: number, cursor_at=Cursor)


async def test_failure_names_the_last_that_was_taken_and_those_refused_before_it() -> None:
    sent: list[int] = []
    gone = OSError("gone")
    with pytest.raises(TakenInPart) as caught:
        await sender_of({2: Unacceptable("no 2"), 5: gone}, sent).send([[1, 2, 3], [4], [5, 6]])
    assert (sent, caught.value.cursor.row_id, caught.value.__cause__) == ([1, 3, 4], 4, gone)
    assert [(one.row_id, one.reason) for one in caught.value.cursor.refused] == [(2, "no 2")]


async def test_refusals_before_anything_was_taken_are_settled_by_no_failure() -> None:
    with pytest.raises(PostFailed, match=r"^away$"):
        await sender_of({1: Unacceptable("no"), 2: PostFailed("away")}, []).send([[1], [2]])


async def test_write_that_lasts_too_long_ends_before_it_is_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LONGEST_S", 0.0)
    sent: list[int] = []
    with pytest.raises(TakenInPart) as caught:
        await sender_of({}, sent).send([[1], [2]])
    assert sent == [1] and caught.value.cursor == Cursor(1)
