"""Keeps the batches of rollouts whose checkpoint is not durable yet, on disk, so that they can be given again.

A file is written whole or not at all, and carries a checksum; a damaged one is set aside and made anew. Also keeps the
journal: where this service would go on if it were restarted now.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson
import structlog

from furlong.checksum import bytes_checksum
from furlong.rundir import write_atomically
from furlong.v1 import rollout_pb2, sample_pb2
from services.rollout.feed import FeedPosition

log = structlog.get_logger()

MAGIC = b"FURLONG BATCH 1\n"
_LENGTH = struct.Struct("<Q")

Details = Sequence[Sequence[Mapping[str, Any] | None]]  # Any: JSON
"""What the reward function gave beside the rewards, by group and sample; None for a sample without."""


@dataclass(frozen=True)
class KeptBatch:
    """One rollout, as it was answered."""

    rollout_id: int
    groups: list[sample_pb2.Group]
    summary: rollout_pb2.BatchSummary
    before: FeedPosition
    after: FeedPosition
    settings: str
    """Fingerprint of all settings that shaped it."""
    weights_digest: str
    """Names the bytes of the weights that wrote it."""
    attempt: int
    """The attempt whose metrics hold its values."""
    values: Mapping[str, Any]  # Any: encoded metric values
    """Its metrics, so that a later attempt's row is complete too."""
    details: Details = ()
    """Empty: it was kept by a version that did not keep them."""


@dataclass(frozen=True)
class Journal:
    """Where the service is."""

    attempt: int
    next_rollout_id: int
    position: FeedPosition
    """Before the draw of next_rollout_id."""
    settings: str


class BatchStore:
    """The folder of kept batches."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._newest: KeptBatch | None = None

    def write(self, batch: KeptBatch) -> None:
        """Keep a batch, durably."""
        write_atomically(self._path(batch.rollout_id), encode_batch(batch))
        self._newest = batch

    def read(self, rollout_id: int) -> KeptBatch | None:
        """A kept batch. None: there is none, or it was damaged and set aside."""
        if self._newest is not None and self._newest.rollout_id == rollout_id:
            return self._newest
        path = self._path(rollout_id)
        try:
            return decode_batch(path.read_bytes())
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            aside = path.with_suffix(".damaged")
            path.replace(aside)
            log.error("kept_batch_damaged", rollout_id=rollout_id, path=str(aside), error=str(error))
            return None

    def ids(self) -> list[int]:
        """Rollouts that are kept, ascending."""
        names = (path.stem.removeprefix("batch-") for path in self._folder.glob("batch-*.pb"))
        return sorted(int(name) for name in names if name.isdecimal())

    def forget(self, *, up_to: int | None = None, since: int | None = None) -> list[int]:
        """Drop batches up to and including one, or from one on; which."""
        gone = [i for i in self.ids() if (up_to is not None and i <= up_to) or (since is not None and i >= since)]
        for rollout_id in gone:
            self._path(rollout_id).unlink(missing_ok=True)
        if self._newest is not None and self._newest.rollout_id in gone:
            self._newest = None
        return gone

    def write_journal(self, journal: Journal) -> None:
        """Note where the service is."""
        write_atomically(self._folder / "journal.json", orjson.dumps(asdict(journal)))

    def read_journal(self) -> Journal | None:
        """Where the service was. None: no journal, or not a readable one."""
        path = self._folder / "journal.json"
        try:
            tree = orjson.loads(path.read_bytes())
            return Journal(
                attempt=int(tree["attempt"]),
                next_rollout_id=int(tree["next_rollout_id"]),
                position=FeedPosition(**tree["position"]),
                settings=str(tree["settings"]),
            )
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            log.error("rollout_journal_damaged", path=str(path), error=str(error))
            return None

    def _path(self, rollout_id: int) -> Path:
        return self._folder / f"batch-{rollout_id:08d}.pb"


def encode_batch(batch: KeptBatch) -> bytes:
    """Magic, header, summary, groups, each after its length, and a checksum of it all."""
    header = {
        "rollout_id": batch.rollout_id,
        "before": asdict(batch.before),
        "after": asdict(batch.after),
        "settings": batch.settings,
        "weights_digest": batch.weights_digest,
        "attempt": batch.attempt,
        "values": dict(batch.values),
        "details": json.dumps(batch.details),  # the standard library's: it keeps NaN, Infinity and long integers
    }
    parts = [orjson.dumps(header), batch.summary.SerializeToString()]
    parts += [group.SerializeToString() for group in batch.groups]
    body = MAGIC + b"".join(_LENGTH.pack(len(part)) + part for part in parts)
    return body + bytes.fromhex(bytes_checksum(body))


def decode_batch(content: bytes) -> KeptBatch:
    """The inverse of encode_batch. Raises ValueError."""
    body, checksum = content[:-16], content[-16:]
    if not body.startswith(MAGIC) or bytes.fromhex(bytes_checksum(body)) != checksum:
        raise ValueError("not a kept batch, or damaged")
    parts, start = [], len(MAGIC)
    while start < len(body):
        (size,) = _LENGTH.unpack_from(body, start)
        parts.append(body[start + _LENGTH.size : start + _LENGTH.size + size])
        start += _LENGTH.size + size
    header = orjson.loads(parts[0])
    return KeptBatch(
        rollout_id=header["rollout_id"],
        groups=[sample_pb2.Group.FromString(part) for part in parts[2:]],
        summary=rollout_pb2.BatchSummary.FromString(parts[1]),
        before=FeedPosition(**header["before"]),
        after=FeedPosition(**header["after"]),
        settings=header["settings"],
        weights_digest=header["weights_digest"],
        attempt=header["attempt"],
        values=header["values"],
        details=json.loads(header.get("details", "[]")),
    )
