"""Calls the user's log functions and judges their answer: only True means that the default values are not logged.

A hook gets copies, made and looked at on its own thread, within its limit; whatever it does, logging goes on.
"""

from collections.abc import Callable
from typing import Any

import structlog

from furlong.config import RunConfig
from furlong.hooks import Hook, load_hook
from services.rollout.call_pool import CallPool, CallTimeout
from services.rollout.flags import Flags
from services.rollout.sample_view import Sample
from services.rollout.user_values import describe_error, describe_value

log = structlog.get_logger()

Extra = dict[str, float]
EvalData = dict[str, dict[str, Any]]  # Any: what Miles hands to evaluation hooks


class LogHooks:
    """The two log functions that a run may name."""

    def __init__(self, config: RunConfig, flags: Flags) -> None:
        """Loads them. Raises ConfigError."""
        rollout = config.rollout
        self._train = _Hook.load(
            rollout.custom_rollout_log_function_path, "custom_rollout_log_function_path", rollout.log_hook_timeout_s
        )
        self._eval = _Hook.load(
            rollout.custom_eval_rollout_log_function_path,
            "custom_eval_rollout_log_function_path",
            rollout.log_hook_timeout_s,
        )
        self._flags = flags

    @property
    def wants_rollouts(self) -> bool:
        """Whether a rollout hook is set; without one no samples need be copied."""
        return self._train is not None

    @property
    def wants_evaluations(self) -> bool:
        """Whether an evaluation hook is set."""
        return self._eval is not None

    async def handled_rollout(
        self, rollout_id: int, samples: Callable[[], list[Sample]], extra: Extra, rollout_time_s: float
    ) -> bool:
        """Whether the hook took the logging of this rollout over. samples: makes the copies, on the hook's thread."""
        if self._train is None:
            return False
        return await self._train.handled(lambda: (rollout_id, self._flags, samples(), dict(extra), rollout_time_s))

    async def handled_evaluation(self, rollout_id: int, data: Callable[[], EvalData], extra: Extra) -> bool:
        """Whether the hook took the logging of this evaluation over. data: makes set name to its rewards, truncated
        flags and samples, as Miles hands them over."""
        if self._eval is None:
            return False
        return await self._eval.handled(lambda: (rollout_id, self._flags, data(), dict(extra)))

    def close(self) -> None:
        """Let the threads end."""
        for hook in (self._train, self._eval):
            if hook is not None:
                hook.pool.close()


class _Hook:
    def __init__(self, function: Hook, path: str, timeout_s: float) -> None:
        self.pool = CallPool(1, name="log-hook")
        self._function = function
        self._path = path
        self._timeout_s = timeout_s
        self._warned: set[str] = set()

    @classmethod
    def load(cls, path: str, key: str, timeout_s: float) -> "_Hook | None":
        return cls(load_hook(path, key=f"rollout.{key}"), path, timeout_s) if path else None

    async def handled(self, make: Callable[[], tuple[object, ...]]) -> bool:
        given: list[tuple[object, ...]] = []

        def call() -> Any:  # Any: a user's answer
            given.append(make())
            return self._function(*given[0])

        def judge(answer: object) -> tuple[bool, str, bool]:
            text = "" if isinstance(answer, bool) else describe_value(answer)
            return answer is True, text, not _same(given[0], make())

        try:
            handled, odd_answer, changed = await self.pool.call(call, timeout_s=self._timeout_s, read=judge)
        except CallTimeout as error:
            log.warning("log_hook_failed", hook=self._path, error=str(error), flag="--log-hook-timeout-s")
            return False
        except Exception as error:  # a user's function may raise anything
            log.warning("log_hook_failed", hook=self._path, error=describe_error(error), exc_info=error)
            return False
        if odd_answer:
            rule = "must return True (handled) or False; default logging goes on"
            self._warn_once("log_hook_answer_not_bool", answer=odd_answer, rule=rule)
        if changed:
            rule = "samples and values are copies; what a hook changes in them is not used"
            self._warn_once("log_hook_changed_its_copies", rule=rule)
        return bool(handled)

    def _warn_once(self, event: str, **fields: object) -> None:
        if event not in self._warned:
            self._warned.add(event)
            log.warning(event, hook=self._path, **fields)


def _same(first: object, second: object) -> bool:
    """Whether two copies of one thing are still alike. A NaN is like another."""
    if first is second or first == second:
        return True
    if isinstance(first, (tuple, list)) and isinstance(second, type(first)) and len(first) == len(second):
        return all(map(_same, first, second))
    if isinstance(first, dict) and isinstance(second, dict) and first.keys() == second.keys():
        return all(_same(item, second[key]) for key, item in first.items())
    if isinstance(first, Sample) and isinstance(second, Sample):
        return _same(vars(first), vars(second))
    return repr(first) == repr(second)
