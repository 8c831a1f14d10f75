"""Checkpoints of a run: one folder each, complete or absent, the newest sound one used.

checkpoints/rollout_000012/   hf/ (config, weights, tokenizer: a transformers folder), optimizer.safetensors,
                              trainer.json, rollout_state.bin, meta.json (written last: checksums, fingerprint)

A folder is written under a hidden name, synced, then renamed: a crash leaves the old ones and a hidden rest, which is
reported and removed at the next start. Never deletes an older checkpoint before the newer one is durable.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import structlog

log = structlog.get_logger()

FORMAT = 1
META = "meta.json"
ROLLOUT_STATE = "rollout_state.bin"
HIDDEN = ".writing-"
ASIDE = ".unsound"


class CheckpointError(Exception):
    """A checkpoint could not be written, or none of those there can be used; the text says what to do."""


@dataclass(frozen=True)
class Meta:
    """What a checkpoint says of itself."""

    rollout_id: int
    """The last rollout that it holds; the next one is rollout_id + 1."""
    policy_version: int
    train_step: int
    skipped_steps: int
    fingerprint: Mapping[str, str]
    """What must be equal for a resume to be right: model shapes, dtype."""
    advisory: Mapping[str, str]
    """What may change, with a warning: seed, batch sizes."""
    evaluation_owed: bool = False
    """An evaluation of these weights was due and did not happen: the start that goes on from here makes up for it."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    folder: Path
    meta: Meta

    def rollout_state(self) -> bytes:
        return (self.folder / ROLLOUT_STATE).read_bytes()


class Checkpoints:
    """The checkpoints of one run directory."""

    def __init__(self, root: Path, *, keep: int) -> None:
        self._root = root
        self._keep = keep

    def newest(self) -> Checkpoint | None:
        """The newest checkpoint whose files are as they were written; None: there is none at all.

        A damaged one is passed over with a warning, for the one before it. Raises CheckpointError if all are damaged.
        """
        folders = self._complete()
        for folder in reversed(folders):
            try:
                return Checkpoint(folder, verified(folder))
            except CheckpointError as error:
                log.warning("checkpoint_damaged", folder=str(folder), reason=str(error))
        if folders:
            raise CheckpointError(
                f"none of the {len(folders)} checkpoints in {self._root} can be used; the newest is "
                f"{folders[-1].name}. The log says what is wrong with each. Restore one, or move the folder away to "
                f"start from the beginning."
            )
        return None

    def newest_rollout_id(self) -> int | None:
        """The rollout of the newest complete checkpoint by its name; its files are not looked at."""
        folders = self._complete()
        return _rollout_id(folders[-1]) if folders else None

    def owes_evaluation(self) -> bool:
        """Whether the newest complete checkpoint says so; its other files are not looked at."""
        folders = self._complete()
        try:
            return bool(folders and json.loads((folders[-1] / META).read_text())["meta"]["evaluation_owed"])
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def clear_remains(self) -> None:
        """Report and remove what an interrupted save left behind. Only while nobody else saves."""
        for path in sorted(self._root.glob(f"{HIDDEN}*")):
            log.warning("checkpoint_incomplete_removed", folder=path.name)
            shutil.rmtree(path, ignore_errors=True)

    def save(
        self,
        meta: Meta,
        *,
        rollout_state: bytes,
        write: Callable[[Path], None],
        before_commit: Callable[[], None] = lambda: None,
    ) -> Checkpoint:
        """Write one checkpoint durably, then remove those beyond the number to keep.

        write: puts the trainer's files into the folder it is given. before_commit: called when all is written and
        nothing counts yet. Raises CheckpointError; older ones are intact then.
        """
        final = self._root / f"rollout_{meta.rollout_id:06d}"
        hidden = self._root / f"{HIDDEN}{final.name}"
        try:
            shutil.rmtree(hidden, ignore_errors=True)
            hidden.mkdir(parents=True)
            write(hidden)
            (hidden / ROLLOUT_STATE).write_bytes(rollout_state)
            _seal(hidden, meta)
            before_commit()
            if final.exists():  # damaged, or saved by an attempt that was given up: it must not stand in the way
                _set_aside(final)
            hidden.rename(final)
            _sync_folder(self._root)
        except OSError as error:
            shutil.rmtree(hidden, ignore_errors=True)
            raise CheckpointError(
                f"checkpoint {final.name} could not be written to {self._root}: {error}. Older checkpoints are intact. "
                f"Free space or mend the permissions, then start the run again."
            ) from error
        self._prune(final)
        return Checkpoint(final, meta)

    def _complete(self) -> list[Path]:
        """Oldest first. By number: as text rollout_1000000 stands before rollout_999999."""
        found = [path for path in self._root.glob("rollout_*") if path.name.removeprefix("rollout_").isdecimal()]
        return sorted((path for path in found if (path / META).is_file()), key=_rollout_id)

    def _prune(self, newest: Path) -> None:
        older = [path for path in self._complete() if _rollout_id(path) < _rollout_id(newest)]
        for path in older[: max(0, len(older) + 1 - self._keep)]:
            _set_aside(path)
        for path in self._root.glob(f"*{ASIDE}"):
            shutil.rmtree(path, ignore_errors=True)


def _rollout_id(folder: Path) -> int:
    return int(folder.name.removeprefix("rollout_"))


def verified(folder: Path) -> Meta:
    """The meta of a checkpoint, its files compared with their checksums. Raises CheckpointError naming the file."""
    try:
        tree = json.loads((folder / META).read_text())
        if tree["format"] != FORMAT:
            raise CheckpointError(f"{META}: format {tree['format']} is not known here; this version reads {FORMAT}")
        files, meta = tree["files"], Meta(**tree["meta"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{META} cannot be read: {error!r}") from error
    for name, digest in files.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{name} is missing")
        if file_digest(path) != digest:
            raise CheckpointError(f"{name} is not as it was written (its checksum differs)")
    return meta


def differences(saved: Mapping[str, str], now: Mapping[str, str]) -> Sequence[str]:
    """Each key whose value changed, with both values, as text."""
    return [
        f"{key}: saved {saved.get(key, 'nothing')}, now {now.get(key, 'nothing')}"
        for key in sorted({*saved, *now})
        if saved.get(key) != now.get(key)
    ]


def file_digest(path: Path) -> str:
    """BLAKE2b of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()[:32]


def _seal(folder: Path, meta: Meta) -> None:
    """Sync every file, then write and sync meta.json, which makes the folder complete."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    files = {str(path.relative_to(folder)): file_digest(path) for path in paths}
    for path in paths:
        _sync_file(path)
    for path in folder.rglob("*"):
        if path.is_dir():
            _sync_folder(path)
    target = folder / META
    target.write_text(json.dumps({"format": FORMAT, "meta": asdict(meta), "files": files}, indent=1))
    _sync_file(target)
    _sync_folder(folder)


def _set_aside(path: Path) -> None:
    """Rename a folder so that it is no checkpoint any more, before its files go: a crash leaves no half of it."""
    aside = path.with_name(f".{path.name}{ASIDE}")
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)


def _sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
