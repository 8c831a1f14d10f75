"""Calls the user's log functions and judges their answer: only True means that the default values are not logged.

A hook gets copies, runs off the event loop with a limit, and whatever it does, logging goes on.
"""

from collections.abc import Callable
from typing import Any

import structlog

from furlong.config import RunConfig
from furlong.hooks import Hook, load_hook
from services.rollout.call_pool import CallPool, CallTimeout
from services.rollout.sample_view import Flags, Sample
from services.rollout.user_values import describe_error, describe_value

log = structlog.get_logger()


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
        self, rollout_id: int, samples: list[Sample], extra: dict[str, float], rollout_time_s: float
    ) -> bool:
        """Whether the hook took the logging of this rollout over."""
        if self._train is None:
            return False
        return await self._train.handled(rollout_id, self._flags, samples, extra, rollout_time_s)

    async def handled_evaluation(
        self, rollout_id: int, data: dict[str, dict[str, Any]], extra: dict[str, float]
    ) -> bool:
        """Whether the hook took the logging of this evaluation over. data: set name to its rewards, truncated flags and
        samples, as Miles hands them over."""
        if self._eval is None:
            return False
        return await self._eval.handled(rollout_id, self._flags, data, extra)

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
        self._warned_of_answer = False

    @classmethod
    def load(cls, path: str, key: str, timeout_s: float) -> "_Hook | None":
        return cls(load_hook(path, key=f"rollout.{key}"), path, timeout_s) if path else None

    async def handled(self, *arguments: object) -> bool:
        call: Callable[[], Any] = lambda: self._function(*arguments)  # noqa: E731  (Any: a user's answer)
        try:
            answer = await self.pool.call(call, timeout_s=self._timeout_s)
        except CallTimeout as error:
            log.warning("log_hook_failed", hook=self._path, error=str(error), flag="--log-hook-timeout-s")
            return False
        except Exception as error:  # a user's function may raise anything
            log.warning("log_hook_failed", hook=self._path, error=describe_error(error), exc_info=error)
            return False
        if answer is True:
            return True
        if answer is not False and not self._warned_of_answer:
            self._warned_of_answer = True
            rule = "must return True (handled) or False; default logging goes on"
            log.warning("log_hook_answer_not_bool", hook=self._path, answer=describe_value(answer), rule=rule)
        return False
