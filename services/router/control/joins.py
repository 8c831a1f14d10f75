"""What many workers said about models and loads as the one answer that a client of one engine expects. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import orjson

Tree = dict[str, Any]  # Any: JSON's own open tree
Said = Sequence[tuple[str, bytes]]
"""Worker's address and the body of its answer."""


def tree_of(body: bytes) -> Any:  # Any: JSON's own open tree
    """What a worker answered, as a tree that can be written again. Raises ValueError."""
    tree = orjson.loads(body)
    try:
        orjson.dumps(tree)
    except orjson.JSONEncodeError as error:  # more can be read than written: a thousand brackets in each other
        raise ValueError(str(error)) from error
    return tree


def join_models(said: Said) -> tuple[list[Tree], dict[str, str]]:
    """The models that any worker has, each once, in the order first seen; and what could not be read, by worker."""
    models: dict[str, Tree] = {}
    problems: dict[str, str] = {}
    for worker, body in said:
        listed = _tree(body).get("data")
        if not isinstance(listed, list):
            problems[worker] = "answered something that is no list of models"
            continue
        for model in listed:
            if isinstance(model, dict) and isinstance(model.get("id"), str):
                models.setdefault(model["id"], model)
    return list(models.values()), problems


def join_loads(said: Said) -> tuple[Tree, dict[str, str]]:
    """The loads of all workers as of one with many ranks, each marked with its worker; and what could not be read."""
    loads: list[Tree] = []
    problems: dict[str, str] = {}
    joined: Tree = {}
    num_accelerators = 0
    for worker, body in said:
        tree = _tree(body)
        ranks = tree.get("loads")
        if not isinstance(ranks, list):
            problems[worker] = "answered something that is no list of loads"
            continue
        loads += [{"worker": worker, **rank} for rank in ranks if isinstance(rank, dict)]
        joined = {**{key: value for key, value in tree.items() if key not in ("loads", "aggregate")}, **joined}
        found = tree.get("num_accelerators")
        num_accelerators += found if isinstance(found, int) else 0
    joined["num_accelerators"] = num_accelerators
    joined["loads"] = loads
    return joined, problems


def old_loads(worker: str, body: bytes) -> list[Tree] | None:
    """What /get_load of older engines, or /v1/loads of newer ones, says, in the words of the older; None: neither."""
    try:
        tree = tree_of(body)
    except ValueError:
        return None
    if isinstance(tree, dict):
        tree = tree.get("loads", [tree])
    if not isinstance(tree, list) or not all(isinstance(rank, dict) for rank in tree):
        return None
    return [_old_load(worker, rank) for rank in tree]


def num_requests(loads: Iterable[Mapping[str, Any]]) -> int:
    """Requests that run or wait."""
    return sum(int(load["num_reqs"]) for load in loads)


def _old_load(worker: str, rank: Tree) -> Tree:
    waiting = _number(rank, "num_waiting_reqs")
    running = _number(rank, "num_running_reqs")
    return {
        "worker": worker,
        "dp_rank": _number(rank, "dp_rank"),
        "num_reqs": _number(rank, "num_reqs") if "num_reqs" in rank else running + waiting,
        "num_waiting_reqs": waiting,
        "num_tokens": _number(rank, "num_tokens") or _number(rank, "num_total_tokens", "num_used_tokens"),
    }


def _number(rank: Tree, *names: str) -> int:
    found = next((rank[name] for name in names if name in rank), 0)
    return int(found) if isinstance(found, (int, float)) else 0


def _tree(body: bytes) -> Tree:
    try:
        found = tree_of(body)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
