"""A few samples of a rollout as a table for people to read: `rollout/samples`. Nothing is computed of it."""

from collections.abc import Iterable
from itertools import islice

from furlong.records import Table
from services.rollout.sample_view import Sample

MAX_CHARS = 2_000
"""Of a prompt or a response; more is cut off with a mark."""
COLUMNS = ("group_index", "sample_index", "prompt", "response", "reward", "label", "status")


def sample_table(samples: Iterable[Sample], *, num_rows: int) -> Table:
    """The first samples, in the order of their groups."""
    return Table(COLUMNS, tuple(map(_row, islice(samples, num_rows))))


def _row(sample: Sample) -> tuple[str | int | float | None, ...]:
    return (
        sample.group_index,
        sample.sample_index,
        _clipped(sample.prompt),
        _clipped(sample.response),
        sample.reward,
        _clipped(str(sample.label)),
        sample.status.value,
    )


def _clipped(text: str) -> str:
    return text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}...[{len(text) - MAX_CHARS} more characters]"
