"""The queue of one listener: in order, taken a bounded piece at a time, and what is lost is counted once."""

from services.metrics.feed import MAX_QUEUED_BYTES, TAKE_BYTES, AlertChange, Feed

SIZE = 100 * 1024


def item(number: int) -> AlertChange:
    return AlertChange(number, "r", b"x" * SIZE)


async def test_what_waits_is_taken_in_order_a_bounded_piece_at_a_time() -> None:
    feed = Feed()
    listener = feed.listen()
    for number in range(50):
        feed.publish_alert(number, "r", b"x" * SIZE)
    taken: list[int] = []
    while len(taken) < 50:
        lost, items = await listener.next(1.0)
        assert (lost, bool(items), len(items) * SIZE < TAKE_BYTES + SIZE) == (0, True, True)
        taken += [one.alert_id for one in items if isinstance(one, AlertChange)]
    assert taken == list(range(50))
    assert await listener.next(0.01) == (0, [])


async def test_what_is_lost_is_told_once_and_the_newest_is_kept() -> None:
    listener = Feed().listen()
    for number in range(1000):
        listener.put(item(number), SIZE)
    lost, items = await listener.next(1.0)
    assert lost == 1000 - MAX_QUEUED_BYTES // SIZE
    assert items[0] == item(lost)
    assert (await listener.next(1.0))[0] == 0
