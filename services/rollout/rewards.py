"""Rewards: the built-in ones, and a user's own function; each sample gets a number or a reason why it has none.

Never on the event loop when it is a user's function, never without a limit. Built-in rewards are pure.
"""

import math
import numbers
import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from furlong.config import RunConfig
from furlong.hooks import Hook, load_hook
from services.rollout.call_pool import CallPool, CallTimeout
from services.rollout.flags import Flags
from services.rollout.sample_view import Sample
from services.rollout.user_values import as_json, describe_error, describe_value

_NUMBER = re.compile(r"(?<![\d.])[-+]?\d[\d,]*(?:\.\d+)?|\d[\d,]*(?:\.\d+)?")


class RewardMisconfigured(Exception):
    """The reward function and the flags do not fit each other: every sample would fail the same way."""


@dataclass(frozen=True)
class Reward:
    """What came of rewarding one sample."""

    value: float | None
    """None: no reward; `error` says why."""
    error: str = ""
    details: Mapping[str, Any] | None = None  # Any: the user's own
    """The dict that the function gave, if it gave one, as JSON can hold it."""


class RewardFunction:
    """The reward that the run names."""

    def __init__(self, config: RunConfig, flags: Flags) -> None:
        """Loads the user's function. Raises ConfigError."""
        rollout = config.rollout
        self._built_in = rollout.rm_type
        self._path = rollout.custom_rm_path
        self._key = rollout.reward_key
        self._timeout_s = rollout.rm_timeout_s
        self._flags = flags
        self._hook: Hook | None = load_hook(self._path, key="rollout.custom_rm_path") if self._path else None
        self._pool = CallPool(rollout.rm_num_workers, name="reward")

    async def score(self, sample: Sample) -> Reward:
        """Reward one sample. Raises RewardMisconfigured; whatever else goes wrong is in the answer."""
        hook = self._hook
        if hook is None:
            return Reward(built_in_reward(self._built_in or "", sample.response, _label(sample)))
        try:
            reward: Reward = await self._pool.call(
                lambda: hook(self._flags, sample), timeout_s=self._timeout_s, read=self._read
            )
        except RewardMisconfigured:
            raise
        except CallTimeout as error:
            return Reward(None, f"reward function {self._path} {error} (--rm-timeout-s)")
        except Exception as error:  # a user's function, and what it gives, may raise anything
            return Reward(None, f"reward function {self._path} raised {describe_error(error)}")
        return reward

    def close(self) -> None:
        """Let the threads end."""
        self._pool.close()

    def _read(self, result: object) -> Reward:
        details = None
        if isinstance(result, Mapping):
            given = dict(result)
            details = as_json(given)
            keys = ", ".join(map(repr, list(details)[:50])) or "none"
            if not self._key:
                raise RewardMisconfigured(
                    f"{self._path} gave a dict and no key was configured; its keys: {keys}. Give --reward-key."
                )
            if self._key not in given:
                raise RewardMisconfigured(
                    f"{self._path} gave a dict without the key {self._key!r} of --reward-key; its keys: {keys}."
                )
            result = given[self._key]
        value = _number(result)
        if value is None:
            return Reward(
                None, f"reward function {self._path} must give a number, got {describe_value(result)}", details
            )
        if not math.isfinite(value):
            return Reward(None, f"reward function {self._path} gave {value}, which is refused", details)
        return Reward(value, "", details)


def built_in_reward(kind: str, response: str, label: str) -> float:
    """last_number: whether the last number in the response equals the label's; exact_match: whether the stripped
    response equals the label."""
    if kind == "exact_match":
        return float(response.strip() == label.strip())
    said, wanted = last_number(response), last_number(label)
    return float(said is not None and said == wanted)


def last_number(text: str) -> Decimal | None:
    """The last number in a text, thousands separators allowed. None: there is none."""
    found = _NUMBER.findall(text)
    if not found:
        return None
    try:
        return Decimal(found[-1].replace(",", ""))
    except InvalidOperation:
        return None


def _label(sample: Sample) -> str:
    return "" if sample.label is None else str(sample.label)


def _number(value: object) -> float | None:
    """Python, numpy and 0-dim tensor scalars as a float."""
    if isinstance(value, numbers.Real):  # bool too: a reward of True is 1
        return float(value)
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "shape", None) == ():
        scalar = item()
        return float(scalar) if isinstance(scalar, numbers.Real) else None
    return None
