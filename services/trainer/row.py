"""The row that stdout shows for each iteration. A pure formatter."""

from dataclasses import dataclass


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
    lr: float


def format_row(row: IterationRow) -> str:
    """The three lines, without a newline at the end, bars under one another."""
    head = f"[trainer] iter {row.rollout_id + 1}/{row.num_rollout} "
    kl = f" kl={_number(row.kl)}" if row.show_kl else ""
    spent = f"rollout={_seconds(row.rollout_s)} train={_seconds(row.train_s)} p2p={_seconds(row.p2p_s)}"
    lines = (
        f"loss={_number(row.loss)} reward={_number(row.reward)}{kl}",
        f"{spent}  (total {_seconds(row.total_s)})",
        f"grad_norm={_number(row.grad_norm)} lr={row.lr:.1e}",
    )
    margin = " " * len(head)
    return "\n".join(f"{margin if index else head}| {line}" for index, line in enumerate(lines))


def _number(value: float | None) -> str:
    return "n/a" if value is None else f"{value + 0.0:.3g}"  # no minus before a zero


def _seconds(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.1f}s"
