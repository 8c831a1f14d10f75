"""One folder of event files: one axis of one run. Decides what is written so that TensorBoard shows one whole curve.

TensorBoard draws events in the order in which they stand, and forgets what stands from a step on when a purge says so.
So a row that comes to a step that a tag has reached already (a resume behind it, a late amendment) makes us write a
purge from its step, and after it again what is still true from there on. Every event names its row: what a file holds
is not written again, whoever was killed. Only this process writes here, and it touches no file of others.
"""

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any  # Any: messages of tensorboard_events.py

from services.metrics.sinks.tensorboard_events import (
    Place,
    Point,
    Purge,
    encode_header,
    encode_point,
    encode_purge,
    read_file,
)

WINDOW_STEPS = 256
"""Newest steps that are held; what reaches back further reads the files."""
_SUFFIX = ".furlong"


class AxisFolder:
    """Reads what is there when it is opened, then appends to a new file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.through = 0
        """The last row that is in the files."""
        self._attempt = 0
        self._top_step: int | None = None
        self._tag_steps: dict[str, int] = {}
        self._window: dict[int, list[Point]] = {}
        self._is_windowed_from: int | None = None
        self._handle = -1
        self._size = 0
        path.mkdir(parents=True, exist_ok=True)
        unfinished = self._restore()
        if unfinished is not None:
            self._replay(unfinished)

    def add(self, place: Place, values: Mapping[str, Any]) -> None:
        """Show a row that is current. One that is there already is passed over. Raises OSError."""
        if place.row_id <= self.through:
            return
        reached = max((self._tag_steps.get(tag, place.step - 1) for tag in values), default=place.step - 1)
        resumes = place.attempt > self._attempt and self._top_step is not None and self._top_step >= place.step
        point = Point(place, dict(values))
        if reached < place.step and not resumes:
            self._write([encode_point(point)])
            self._note(point)
        else:
            self._purge(point)
        self.through = place.row_id

    def flush(self) -> None:
        """What was added is on the disk."""
        if self._handle >= 0:
            os.fdatasync(self._handle)

    def close(self) -> None:
        """Let go of the file; the next row begins a new one."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def _purge(self, point: Point) -> None:
        """Write anew what stands from the point's step on: of older attempts nothing, of its own all, and the point."""
        step, attempt = point.place.step, point.place.attempt
        kept = [old for old in self._from(step) if old.place.attempt >= attempt]
        self._rewrite(step, merged([*kept, point]))

    def _rewrite(self, step: int, points: Sequence[Point]) -> None:
        now = time.time()
        self._write([encode_purge(Purge(step, len(points)), time_s=now), *map(encode_point, points)])
        self._forget_from(step)
        for point in points:
            self._note(point)

    def _from(self, step: int) -> list[Point]:
        if self._is_windowed_from is None or step >= self._is_windowed_from:
            return [point for at in sorted(self._window) if at >= step for point in self._window[at]]
        return [point for point in _surviving(self._events())[0] if point.place.step >= step]

    def _note(self, point: Point) -> None:
        step = point.place.step
        self.through = max(self.through, point.place.row_id)
        self._attempt = max(self._attempt, point.place.attempt)
        for tag in point.values:
            self._tag_steps[tag] = step
        self._top_step = step if self._top_step is None else max(self._top_step, step)
        if self._is_windowed_from is not None and step < self._is_windowed_from:
            return
        self._window.setdefault(step, []).append(point)
        if len(self._window) > 2 * WINDOW_STEPS:
            self._is_windowed_from = sorted(self._window)[-WINDOW_STEPS]
            self._window = {at: points for at, points in self._window.items() if at >= self._is_windowed_from}

    def _forget_from(self, step: int) -> None:
        """As TensorBoard does. What a tag's last step then is, is known when what is kept is noted."""
        self._window = {at: points for at, points in self._window.items() if at < step}
        self._tag_steps = {tag: min(at, step - 1) for tag, at in self._tag_steps.items()}
        self._top_step = None if self._top_step is None else min(self._top_step, step - 1)

    def _restore(self) -> tuple[int, list[Point]] | None:
        """Read the files. What a kill left unfinished of a purge: its step, and all that must follow it."""
        points, unfinished = _surviving(self._events())
        for point in points:
            self._note(point)
        return unfinished

    def _replay(self, unfinished: tuple[int, list[Point]]) -> None:
        step, kept = unfinished
        self._rewrite(step, merged(kept))

    def _events(self) -> Iterable[Point | Purge]:
        for path in self._files():
            yield from read_file(path)

    def _files(self) -> list[Path]:
        return sorted(self._path.glob(f"events.out.tfevents.*{_SUFFIX}"))

    def _write(self, records: Sequence[bytes]) -> None:
        """All in one call; what a full disk takes only a part of is taken back."""
        if self._handle < 0:
            self._begin_file()
        content = b"".join(records)
        written = 0
        try:
            while written < len(content):
                written += os.write(self._handle, content[written:])
        except OSError:
            os.ftruncate(self._handle, self._size)
            raise
        self._size += len(content)

    def _begin_file(self) -> None:
        """A name that sorts behind all others, which is the order in which TensorBoard reads."""
        names = [path.name.split(".") for path in self._files()]
        seconds = max([int(time.time()), *(int(name[3]) for name in names if name[3].isdigit())])
        number = len(names) + 1
        path = self._path / f"events.out.tfevents.{seconds:010d}.{number:06d}{_SUFFIX}"
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._handle, self._size = handle, 0
        self._write([encode_header(time_s=time.time())])
        folder = os.open(self._path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def merged(points: Iterable[Point]) -> list[Point]:
    """One point a step, in order; of a tag that a step has twice, the newer row's value."""
    by_step: dict[int, Point] = {}
    for point in sorted(points, key=lambda point: point.place.row_id):
        older = by_step.get(point.place.step)
        values = {**older.values, **point.values} if older else dict(point.values)
        by_step[point.place.step] = Point(point.place, values)
    return [by_step[step] for step in sorted(by_step)]


def _surviving(events: Iterable[Point | Purge]) -> tuple[list[Point], tuple[int, list[Point]] | None]:
    """What TensorBoard shows of the events. Where the last purge is not followed by all that it announced: besides, its
    step and what stood from there on before it, which a replay must write again."""
    shown: list[Point] = []
    before: list[Point] = []
    purge, missing = Purge(0, 0), 0
    for event in events:
        if isinstance(event, Purge):
            if not missing:
                before = [point for point in shown if point.place.step >= event.step]
            shown = [point for point in shown if point.place.step < event.step]
            purge, missing = event, event.num_points
        else:
            shown.append(event)
            missing = max(0, missing - 1)
    if not missing:
        return shown, None
    return [point for point in shown if point.place.step < purge.step], (purge.step, before)
