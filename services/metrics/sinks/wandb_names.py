"""What a row's values are called in wandb and over which axis each is drawn. Pure.

Every value has one axis: by its prefix (`train/*` over train/step, ...), else the one it was first seen on. A name that
comes on another axis too, is wandb's own (`_step`), or is that of an axis, gets another name and is never mixed up.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any  # Any: what JSON holds

AXIS_PREFIXES: Mapping[str, tuple[str, ...]] = {
    "train/step": ("train",),
    "rollout/step": ("rollout", "perf", "multi_turn", "passrate"),
    "eval/step": ("eval",),
    "engine/time": ("engine",),
    "router/time": ("router",),
}
MAX_OTHER_NAMES = 20_000
_HOME = {prefix: axis for axis, prefixes in AXIS_PREFIXES.items() for prefix in prefixes}


@dataclass
class Names:
    """The names of one run so far. `other` is to be kept over a restart: what a name meant, it means for ever."""

    other: dict[str, str] = field(default_factory=dict)
    """Name without one of the prefixes -> its axis. An axis itself stands here under its own name."""
    defined: set[str] = field(default_factory=set)
    """What wandb was told of in this process."""

    def globs(self) -> Iterator[tuple[str, str]]:
        """Patterns with their axes."""
        for axis, prefixes in AXIS_PREFIXES.items():
            for prefix in prefixes:
                yield f"{prefix}/*", axis

    def shown(self, name: str, axis: str) -> str:
        """What a value is called."""
        if name.startswith(("_", "@")) or name == "" or self._is_axis(name):
            name = f"@raw/{name}"
        home = _HOME.get(name.split("/")[0]) if "/" in name else None
        if home is None:
            home = self.other.get(name)
            if home is None:
                home = axis
                if len(self.other) < MAX_OTHER_NAMES:
                    self.other[name] = axis
        return name if home == axis else f"@{axis}/{name}"

    def undefined(self, shown: str, axis: str) -> bool:
        """Whether wandb has to be told the axis of this name; once a process."""
        if shown in self.defined or (not shown.startswith("@") and _HOME.get(shown.split("/")[0]) == axis):
            return False
        self.defined.add(shown)
        return True

    def beside(self, body: Mapping[str, Any]) -> dict[str, float | int]:
        """The axis, the attempt and the rollout that stand beside the values of a row."""
        axis = body["axis"]
        prefix = axis.split("/")[0] if axis in AXIS_PREFIXES else axis
        beside: dict[str, float | int] = {axis: body["step"], f"{prefix}/attempt": body["attempt"]}
        if body.get("rollout_id") is not None and axis == "train/step":
            beside["train/rollout_id"] = body["rollout_id"]
        if axis not in AXIS_PREFIXES:
            self.other.setdefault(axis, axis)
        return beside

    def _is_axis(self, name: str) -> bool:
        return name in AXIS_PREFIXES or self.other.get(name) == name or name.endswith(("/attempt", "/rollout_id"))
