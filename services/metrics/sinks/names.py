"""Names as another program allows them: what it does not allow is folded to `_`, and two that fold into one are told
apart. Which raw name came first is kept in a file, so that a restart changes no name.
"""

import hashlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import orjson
import structlog

from furlong.rundir import write_atomically

log = structlog.get_logger()

MAX_KEPT = 50_000
"""Of more names, those that were used the longest ago are forgotten: runs come and go, and a new one's names are as
plain as the first one's."""


class Names:
    """Maps raw names to folded ones, one to one."""

    def __init__(self, fold: Callable[[str], str], *, max_chars: int, kept_in: Path | None = None) -> None:
        self._fold, self._max_chars, self._path = fold, max_chars, kept_in
        self._folded: dict[str, str] = {}
        self._taken: dict[str, str] = {}
        self._is_saved = True
        for raw, folded in _load(kept_in).items():
            self._keep(raw, folded)
        self._is_saved = True

    def folded(self, raw: str) -> str:
        """The name to use for a raw one: always the same, while it is kept."""
        known = self._folded.pop(raw, None)
        if known is not None:
            self._folded[raw] = known  # the last used stands last
            return known
        plain = self._fold(raw)
        wanted = plain if len(plain) <= self._max_chars else self._marked(plain, raw)
        if self._taken.get(wanted, raw) != raw:
            log.warning("metric_names_fold_into_one", name=raw[:200], other=self._taken[wanted][:200], folded=wanted)
            wanted = self._marked(plain, raw)
        if len(self._folded) >= MAX_KEPT:
            self._taken.pop(self._folded.pop(next(iter(self._folded))), None)
        self._keep(raw, wanted)
        return wanted

    def save(self) -> None:
        """Keep what is new. Before the names are used, or a kill could let another take one."""
        if self._path is not None and not self._is_saved:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path, orjson.dumps(self._folded))
        self._is_saved = True

    def _keep(self, raw: str, folded: str) -> None:
        self._folded[raw], self._taken[folded] = folded, raw
        self._is_saved = False

    def _marked(self, plain: str, raw: str) -> str:
        mark = "_" + hashlib.blake2s(raw.encode(errors="surrogatepass"), digest_size=4).hexdigest()
        return plain[: self._max_chars - len(mark)] + mark


def folder_of(allowed: str, replacement: str = "_") -> Callable[[str], str]:
    """A fold that keeps the characters of a regular expression's class, for example `A-Za-z0-9_`."""
    forbidden = re.compile(f"[^{allowed}]")
    return lambda raw: forbidden.sub(replacement, raw)


def _load(path: Path | None) -> Mapping[str, str]:
    try:
        found = orjson.loads(path.read_bytes()) if path else {}
    except (OSError, ValueError):
        return {}
    return {str(raw): str(folded) for raw, folded in found.items()} if isinstance(found, dict) else {}
