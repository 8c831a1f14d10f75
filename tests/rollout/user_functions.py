"""What a user might name by --custom-rm-path and the log function flags, good and bad."""

import asyncio
import functools
import threading
import time
from typing import Any

CALLS: list[Any] = []


def length(args: Any, sample: Any) -> float:
    return float(sample.response_length)


async def in_async(args: Any, sample: Any) -> float:
    await asyncio.sleep(0)
    return 2.0


def _with_bonus(args: Any, sample: Any, bonus: float) -> float:
    return 1.0 + bonus


partial = functools.partial(_with_bonus, bonus=0.5)
async_partial = functools.partial(in_async)


class _Scorer:
    async def __call__(self, args: Any, sample: Any) -> float:
        return 3.0


scorer = _Scorer()


def slow_for_one(args: Any, sample: Any) -> float:
    if sample.sample_index == 1 and sample.group_index == 0:
        time.sleep(2.0)
    return 1.0


def slow_always(args: Any, sample: Any) -> float:
    time.sleep(1.0)
    return 1.0


async def slow_async(args: Any, sample: Any) -> float:
    await asyncio.sleep(3600)
    return 1.0


def raising(args: Any, sample: Any) -> float:
    raise KeyError("no such thing")


def raising_for_one(args: Any, sample: Any) -> float:
    return raising(args, sample) if (sample.group_index, sample.sample_index) == (1, 1) else 1.0


def stopping(args: Any, sample: Any) -> float:
    raise StopIteration


def exiting(args: Any, sample: Any) -> float:
    raise SystemExit(3)


def as_dict(args: Any, sample: Any) -> dict[str, Any]:
    return {"score": 0.5, "acc": 1}


def not_a_number(args: Any, sample: Any) -> float:
    return float("nan")


def text(args: Any, sample: Any) -> str:
    return "1.0"


def from_numpy(args: Any, sample: Any) -> Any:
    import numpy

    return numpy.float32(0.25)


def looks_at_everything(args: Any, sample: Any) -> float:
    CALLS.append((args, sample))
    sample.tokens.clear()
    sample.metadata["seen"] = True
    return 1.0


def log_true(rollout_id: int, args: Any, samples: list[Any], extra: dict[str, float], rollout_time: float) -> bool:
    CALLS.append((rollout_id, args, samples, extra, rollout_time))
    for sample in samples:
        sample.reward = -1.0
        sample.tokens.clear()
    return True


def log_samples(rollout_id: int, args: Any, samples: list[Any], extra: dict[str, float], rollout_time: float) -> bool:
    CALLS.append(samples)
    return False


def log_false(*arguments: Any) -> bool:
    return False


def log_none(*arguments: Any) -> None:
    return None


def log_zero(*arguments: Any) -> int:
    return 0


def log_text(*arguments: Any) -> str:
    return "x"


def log_one(*arguments: Any) -> int:
    return 1


def log_raising(*arguments: Any) -> bool:
    raise RuntimeError("the gauge is away")


def log_slow(*arguments: Any) -> bool:
    time.sleep(1.0)
    return True


RELEASE = threading.Event()


def log_hanging(*arguments: Any) -> bool:
    RELEASE.wait(60.0)
    return True


def log_changing(rollout_id: int, args: Any, samples: list[Any], extra: dict[str, float], rollout_time: float) -> bool:
    extra["mine"] = 1.0
    for sample in samples:
        sample.reward = 7.0
        sample.metadata["seen"] = True
    return False


def log_looking(rollout_id: int, args: Any, samples: list[Any], extra: dict[str, float], rollout_time: float) -> bool:
    CALLS.append([(s.status.value, s.get_reward_value(args), s.to_dict()["index"]) for s in samples])
    return False


def log_setting(rollout_id: int, args: Any, *rest: Any) -> bool:
    args.lr = 1.0
    return True


class _AsyncLog:
    async def __call__(self, *arguments: Any) -> bool:
        return True


log_async_object = _AsyncLog()
log_async_partial = functools.partial(_AsyncLog.__call__, log_async_object)


async def log_async_hanging(*arguments: Any) -> bool:
    await asyncio.sleep(60.0)
    return True


def log_eval_raising(rollout_id: int, args: Any, data: dict[str, Any], extra: dict[str, float]) -> bool:
    raise RuntimeError("the gauge is away")


async def log_async_true(*arguments: Any) -> bool:
    return True


def log_eval(rollout_id: int, args: Any, data: dict[str, Any], extra: dict[str, float]) -> bool:
    CALLS.append((rollout_id, data, extra))
    return True


class _Evil(float):
    """Fails when it is looked at."""

    def __float__(self) -> float:
        raise RuntimeError("no float")

    def __repr__(self) -> str:
        raise RuntimeError("no repr")


class _EvilError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no message")


def evil(args: Any, sample: Any) -> float:
    return _Evil(1)


def evil_in_list(args: Any, sample: Any) -> Any:
    return [_Evil(1)]


def evil_error(args: Any, sample: Any) -> float:
    raise _EvilError


def too_big_for_a_float(args: Any, sample: Any) -> int:
    return 10**400


def lone_surrogate(args: Any, sample: Any) -> float:
    raise ValueError("cannot parse '\ud800'")


def endless_message(args: Any, sample: Any) -> float:
    raise ValueError("x" * 10_000_000)


def dict_with_a_lock(args: Any, sample: Any) -> dict[str, Any]:
    import threading

    return {"score": 0.5, "lock": threading.Lock(), "category": _Evil(1)}
