"""The marks that an earlier start of the service left, until their files are met again.

A mark's name is its file's device and inode, but what counts is the content. Never opens a file.
"""

import os
from collections.abc import Mapping
from dataclasses import replace

from services.metrics.tailing.content import Content
from services.metrics.tailing.followed import FollowedFile, Mark, Moment
from services.metrics.tailing.patterns import COMPRESSED, is_related
from services.metrics.tailing.records import LineReader

MARK_DAYS = 30
MIN_CONTINUED_BYTES = 4096
"""A file of the same name that begins with as many old bytes goes on where the old one ended."""

Key = tuple[int, int]


class Marks:
    """Used by one thread."""

    def __init__(self, bodies: Mapping[str, bytes], *, run: str) -> None:
        loaded = {name: Mark.load(body) for name, body in bodies.items()}
        self._run = run
        self._known = {(mark.dev, mark.ino): mark for mark in loaded.values() if mark is not None}
        self.dropped: dict[str, None] = {name: None for name, mark in loaded.items() if mark is None}
        """Names of those to remove from the store."""

    def take_of(self, file: FollowedFile) -> Mark | None:
        """The mark of a file, by its numbers. Devices may be numbered anew when a machine starts."""
        mark = self._known.pop((file.dev, file.ino), None)
        if mark is None:
            mark = next((m for m in self._known.values() if (m.path, m.ino) == (file.path, file.ino)), None)
            if mark is not None:
                self._drop(mark)
        return mark

    def take_gone(self, file: FollowedFile) -> tuple[Mark, Content] | None:
        """The mark of a file that is gone, and with all of whose content this one begins."""
        for mark in self._known.values():
            least = _least_common(mark.path, file.path)
            content = mark.content.find_in(file.fd) if least else None
            if content is not None and content.offset >= least and content.begins(file.fd):
                self._drop(mark)
                return mark, content
        return None

    def is_of(self, file: FollowedFile) -> bool:
        """Whether there is a mark that is this file's own, and not that of one that had its inode before."""
        mark = self._known.get((file.dev, file.ino))
        return mark is not None and mark.content.offset > 0 and mark.content.find_in(file.fd) is not None

    def discard(self, file: FollowedFile) -> None:
        """Forget the mark under a file's numbers."""
        self._known.pop((file.dev, file.ino), None)

    def waiting(self) -> list[Mark]:
        """Those whose files were not met."""
        return list(self._known.values())

    def give_up(self, mark: Mark, moment: Moment) -> tuple[list[bytes], bytes | None]:
        """Its file is not there: the records of the tracebacks it holds, and the mark without them, if it held any.

        It is kept for a while: the file may be back.
        """
        if moment.now.timestamp() - mark.saved_s > MARK_DAYS * 86400:
            self._drop(mark)
        if not mark.open:
            return [], None
        if (mark.dev, mark.ino) in self._known:
            self._known[mark.dev, mark.ino] = replace(mark, open=[])
        return self.open_lines(mark), mark.without_open()

    def open_lines(self, mark: Mark) -> list[bytes]:
        """The records of the tracebacks that a mark holds."""
        reader = LineReader(mark.path, self._run)
        reader.joiner.load(mark.open, 0.0)
        return reader.close_all()

    def _drop(self, mark: Mark) -> None:
        del self._known[mark.dev, mark.ino]
        self.dropped[mark.name] = None


def related_paths(path: str) -> list[str]:
    """What a rotation may have made of a file: names beside it that look like its own."""
    folder, name = os.path.split(path)
    try:
        with os.scandir(folder) as entries:
            return [e.path for e in entries if is_related(name, e.name) and not e.name.endswith(COMPRESSED)]
    except OSError:
        return []


def path_of_inode(mark: Mark) -> str:
    """Where a marked file is now, in the folder that it was in. Empty: not there."""
    try:
        with os.scandir(os.path.dirname(mark.path)) as entries:
            path = next((e.path for e in entries if e.inode() == mark.ino and e.is_file(follow_symlinks=False)), "")
    except OSError:
        return ""
    return "" if path.endswith(COMPRESSED) else path


def _least_common(original: str, path: str) -> int:
    """Bytes that a file must begin with to be taken for the rest of one that is gone. 0: the names do not fit."""
    if path == original:
        return MIN_CONTINUED_BYTES
    folder, name = os.path.split(original)
    return 1 if os.path.dirname(path) == folder and is_related(name, os.path.basename(path)) else 0
