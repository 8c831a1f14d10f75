"""Whether the engine's weights can be trusted, and the sessions that change them.

It owns the law that an engine generates only from one complete, verified set of weights: a session that fails, for
whatever reason, leaves the weights invalid and their version unknown until a complete session succeeds. Methods that
write are called from one thread at a time, while no forward pass runs; `Scheduler` sees to that.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from furlong.checksum import tensor_checksum
from services.rollout.engine.checkpoint import CheckpointError, iterate_tensors
from services.rollout.engine.parameters import HEAD, Parameters

UNKNOWN_VERSION = "unknown"
SHOWN_NAMES = 5
WIRE_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
# Wire dtypes that a stored dtype holds exactly; another would change the numbers without a word.
EXACT = {
    torch.float32: {torch.float32, torch.bfloat16, torch.float16},
    torch.bfloat16: {torch.bfloat16},
}


class UpdateError(Exception):
    """An update that is refused or has failed, in words for the trainer's side."""


@dataclass(frozen=True)
class TensorSpec:
    """A tensor as the sender announces it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass
class Session:
    """What has happened since begin_weight_update."""

    received: dict[str, torch.dtype] = field(default_factory=dict)
    version: str | None = None
    failure: str | None = None
    flush: bool = False


class WeightState:
    """The weights' validity, version and open session."""

    def __init__(self, parameters: Parameters, *, version: str) -> None:
        self.parameters = parameters
        self.version = version
        self.sequence = 0
        """Changes with every change of the weights."""
        self.invalid_reason: str | None = "no weights have been loaded yet"
        self.session: Session | None = None
        self.receiving = threading.Lock()
        """Held while tensors are being written."""

    @property
    def usable(self) -> bool:
        """Whether a forward pass may run now."""
        return self.invalid_reason is None and self.session is None

    def open_session(self, *, force: bool = False) -> None:
        """Start an update; an open one blocks it unless that has failed already or `force` drops it."""
        if self.session is not None:
            if not (force or self.session.failure):
                raise UpdateError("a weight-update session is already open; call end_weight_update() first")
            self.give_up("the session was replaced by a new one before it ended")
        self.session = Session()

    def require_session(self, operation: str) -> Session:
        """Return the open session, or say that there is none."""
        if self.session is None:
            raise UpdateError(f"{operation} must run between begin_weight_update() and end_weight_update()")
        return self.session

    def fail(self, reason: str) -> None:
        """Mark the weights as unusable until a complete update."""
        self.invalid_reason = reason
        self.version = UNKNOWN_VERSION
        self.sequence += 1
        if self.session is not None and self.session.failure is None:
            self.session.failure = reason

    def give_up(self, reason: str) -> None:
        """Drop the open session; weights that it has not touched stay valid."""
        session, self.session = self.session, None
        if session is not None and (session.received or session.failure):
            self.fail(session.failure or reason)

    def check(self, specs: Sequence[TensorSpec]) -> None:
        """Refuse tensors that do not belong to this model, naming them."""
        problems: list[str] = []
        for spec in specs:
            target = self.parameters.targets.get(spec.name)
            if target is None:
                problems.append(f"{spec.name}: this model has no such tensor")
            elif target.shape != spec.shape:
                problems.append(f"{spec.name}: shape must be {list(target.shape)}, got {list(spec.shape)}")
            elif spec.dtype not in EXACT[self.parameters.dtype]:
                stored = _name(self.parameters.dtype)
                problems.append(
                    f"{spec.name}: dtype {_name(spec.dtype)} would be rounded to the engine's {stored}; "
                    f"send {stored} or start the engine with --dtype float32"
                )
        if problems:
            raise UpdateError("Tensors refused: " + _shorten(problems, separator="; "))

    def write(self, session: Session, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy checked tensors into the model and remember that they came."""
        with torch.inference_mode():
            for name, tensor in tensors:
                self.parameters.write(name, tensor)
                session.received[name] = tensor.dtype

    def close_session(
        self,
        *,
        version: str | None = None,
        checksums: Mapping[str, str] | None = None,
        expected_names: Sequence[str] | None = None,
    ) -> bool:
        """End the session: verify, take the version. True if weights changed; UpdateError leaves them invalid."""
        session = self.session
        if session is None:
            raise UpdateError("no weight-update session is open; call begin_weight_update() first")
        try:
            self._verify(session, checksums or {}, expected_names)
        except UpdateError as error:
            self.fail(str(error))
            raise
        finally:
            self.session = None
        self._accept(version if version is not None else session.version, changed=bool(session.received))
        return bool(session.received)

    def _accept(self, version: str | None, *, changed: bool) -> None:
        if changed:
            self.sequence += 1
        self.invalid_reason = None
        if version is not None:
            self.version = version

    def _verify(self, session: Session, checksums: Mapping[str, str], expected_names: Sequence[str] | None) -> None:
        if session.failure is not None:
            raise UpdateError(f"The weight update failed: {session.failure}. Send all tensors in a new session.")
        required = self.parameters.required_names() if self.invalid_reason is not None else []
        tied = self.parameters.config.tie_embeddings
        wanted = [*required, *(name for name in expected_names or () if not (tied and name == HEAD))]
        missing = [name for name in dict.fromkeys(wanted) if name not in session.received]
        if missing:
            raise UpdateError(f"The weight update is incomplete: {_shorten(missing)} did not arrive.")
        unknown = [name for name in checksums if name not in self.parameters.targets]
        if unknown:
            raise UpdateError(f"Checksums given for tensors that this model does not have: {_shorten(unknown)}.")
        wrong = [
            name
            for name, wanted_sum in checksums.items()
            if self.checksum(name, dtype=session.received.get(name)) != wanted_sum
        ]
        if wrong:
            raise UpdateError(f"Checksums differ from the sender's: {_shorten(wrong)}. The weights are discarded.")

    def checksum(self, name: str, *, dtype: torch.dtype | None = None) -> str:
        """Return the checksum of a tensor as stored, in the dtype that it was sent in if that is given."""
        tensor = self.parameters.read(name)
        return tensor_checksum(tensor if dtype is None else tensor.to(dtype))

    def all_checksums(self) -> dict[str, str]:
        """Return the checksum of every tensor by name, in the engine's dtype."""
        return {name: self.checksum(name) for name in self.parameters.targets}

    def load_folder(self, model_path: Path, *, version: str | None) -> None:
        """Replace all weights by a checkpoint's; nothing is written unless the whole checkpoint fits."""
        if self.session is not None:
            raise UpdateError("a weight-update session is open; call end_weight_update() first")
        try:
            received = self._read_folder(model_path)
        except CheckpointError as error:
            raise UpdateError(f"Failed to get weights iterator: {error}.") from error
        missing = [name for name in self.parameters.required_names() if name not in received]
        if missing:
            raise UpdateError(f"The checkpoint {str(model_path)!r} lacks {_shorten(missing)}.")
        with torch.inference_mode():
            for name, tensor in received.items():
                self.parameters.write(name, tensor)
        self._accept(version, changed=True)

    def _read_folder(self, model_path: Path) -> dict[str, Tensor]:
        """Tensors in the engine's dtype: a checkpoint may be rounded, since its user chose --dtype."""
        received: dict[str, Tensor] = {}
        for name, tensor in iterate_tensors(model_path):
            target = self.parameters.targets.get(name)
            if target is None or tuple(tensor.shape) != target.shape:
                wanted = "no such tensor" if target is None else f"shape {list(target.shape)}"
                raise UpdateError(
                    f"The checkpoint {str(model_path)!r} does not fit the model: {name} has shape "
                    f"{list(tensor.shape)}, the model has {wanted}."
                )
            received[name] = tensor.to(self.parameters.dtype)
        return received


def wire_specs(names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> list[TensorSpec]:
    """Turn the lists of an update request into specs; UpdateError if they do not match."""
    if not len(names) == len(dtypes) == len(shapes):
        raise UpdateError(
            f"names, dtypes and shapes must be equally long, got {len(names)}, {len(dtypes)}, {len(shapes)}"
        )
    unknown = sorted({item for item in dtypes if item.removeprefix("torch.") not in WIRE_DTYPES})
    if unknown:
        raise UpdateError(f"dtypes must be among {sorted(WIRE_DTYPES)}, got {unknown}")
    return [
        TensorSpec(name=name, dtype=WIRE_DTYPES[dtype.removeprefix("torch.")], shape=tuple(shape))
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True)
    ]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shorten(items: Sequence[str], *, separator: str = ", ") -> str:
    shown = separator.join(items[:SHOWN_NAMES])
    more = len(items) - SHOWN_NAMES
    return f"{shown} and {more} more" if more > 0 else shown
