"""The row that stdout shows for each iteration, as text or as a JSON object. A pure formatter.

Shows only what this iteration's own numbers say: a value that is not there, or comes late, is n/a, never the last one.
"""

import math
from dataclasses import dataclass

import orjson

SHOWN_REST_S = 0.1
"""Seconds beside rollout, train and p2p that are worth showing."""


@dataclass(frozen=True)
class IterationRow:
    """What the row shows. None: there is no such value, shown as n/a; a NaN is shown as nan."""

    rollout_id: int
    num_rollout: int
    loss: float | None
    reward: float | None
    """Mean raw reward."""
    kl: float | None
    show_kl: bool
    """Only with use_kl_loss."""
    rollout_s: float | None
    train_s: float
    p2p_s: float
    total_s: float
    """Wall time of the whole iteration, measured on its own."""
    grad_norm: float | None
    lr: float | None
    other_s: float | None = None
    """What of the total is none of the three: evaluating, saving, waiting for more than sampling, the rest."""
    num_tokens: int | None = None
    """Trained tokens. None: nobody counted."""


def show_row(row: IterationRow, *, as_json: bool) -> str:
    """The row as `--log-format` asks for it, without a newline at the end."""
    return json_row(row) if as_json else format_row(row)


def already_done(run: str, rollout_id: int, num_rollout: int, *, as_json: bool) -> str:
    """What is said in place of rows when nothing is left to train."""
    if as_json:
        done = {"event": "already_done", "run": run, "checkpoint_rollout_id": rollout_id, "num_iters": num_rollout}
        return orjson.dumps(done).decode()
    return (
        f"[trainer] already done: {run} has a checkpoint of rollout {rollout_id}, and --num-rollout is {num_rollout}. "
        "Train on with a larger --num-rollout."
    )


def format_row(row: IterationRow) -> str:
    """The three lines, bars under one another; a fourth says what is wrong with the values, if anything is."""
    head = f"[trainer] iter {row.rollout_id + 1}/{row.num_rollout} "
    kl = f" kl={_number(row.kl)}" if row.show_kl else ""
    spent = f"rollout={_seconds(row.rollout_s)} train={_seconds(row.train_s)} p2p={_seconds(row.p2p_s)}"
    if row.other_s is not None and row.other_s >= SHOWN_REST_S:
        spent += f" other={_seconds(row.other_s)}"
    lines = [
        f"loss={_number(row.loss)} reward={_number(row.reward)}{kl}",
        f"{spent}  (total {_seconds(row.total_s)})",
        f"grad_norm={_number(row.grad_norm)} lr={'n/a' if row.lr is None else f'{row.lr:.1e}'}",
    ]
    if faults := warnings_of(row):
        lines.append(f"WARNING: {', '.join(faults)}")
    margin = " " * len(head)
    return "\n".join(f"{margin if index else head}| {line}" for index, line in enumerate(lines))


def json_row(row: IterationRow) -> str:
    """One JSON object. Times in seconds; null: there is no such value; "NaN", "Infinity": it is not finite."""
    fields: dict[str, object] = {
        "event": "iteration",
        "iter": row.rollout_id + 1,
        "num_iters": row.num_rollout,
        "loss": _plain(row.loss),
        "reward": _plain(row.reward),
        **({"kl": _plain(row.kl)} if row.show_kl else {}),
        "rollout": _plain(row.rollout_s),
        "train": _plain(row.train_s),
        "p2p": _plain(row.p2p_s),
        "other": _plain(row.other_s),
        "total": _plain(row.total_s),
        "grad_norm": _plain(row.grad_norm),
        "lr": _plain(row.lr),
        "num_tokens": row.num_tokens,
    }
    if faults := warnings_of(row):
        fields["warnings"] = faults
    return orjson.dumps(fields).decode()


def warnings_of(row: IterationRow) -> list[str]:
    """What a reader of the row must not miss: values that are not finite, and a step that trained nothing."""
    values = {"loss": row.loss, "reward": row.reward, "kl": row.kl, "grad_norm": row.grad_norm, "lr": row.lr}
    faults = [
        f"{name} is {_number(value)}"
        for name, value in values.items()
        if value is not None and not math.isfinite(value)
    ]
    return [*faults, "0 trained tokens"] if row.num_tokens == 0 else faults


def _number(value: float | None) -> str:
    return "n/a" if value is None else f"{value + 0.0:.3g}"  # no minus before a zero


def _seconds(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.1f}s"


def _plain(value: float | None) -> float | str | None:
    if value is None or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
