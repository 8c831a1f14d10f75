"""The last lines of `furlong up`: how the run went, and where its results are."""

from furlong.config import RunConfig
from furlong.launch.checkpoints import newest_checkpoint
from furlong.launch.rows import Row, read_rows
from furlong.launch.supervisor import Ending
from furlong.process import ExitCode
from furlong.rundir import RunDir

HEADS = {
    ExitCode.DONE: "done",
    ExitCode.DRAINED: "stopped as asked",
    ExitCode.DIVERGED: "stopped: training diverged",
    ExitCode.KILLED: "stopped at once",
}


def closing_lines(config: RunConfig, run_dir: RunDir, ending: Ending, *, seconds: float) -> list[str]:
    """What a person wants to know when a run has ended, however it did."""
    rows = read_rows(run_dir.metrics_rows)
    rollouts = [row for row in rows if row.axis == "rollout/step"]
    trained = 1 + rollouts[-1].step if rollouts else 0
    head = next((text for code, text in HEADS.items() if code == ending.code), "failed")
    lines = [f"{head}: {trained} of {config.run.num_rollout} rollouts; this start took {seconds:.1f} s"]
    if ending.code == ExitCode.DRAINED and ending.reason:
        lines.append(f"  {ending.reason}")
    lines += [f"  {line}" for line in _results(rows, rollouts)]
    checkpoint = newest_checkpoint(run_dir)
    lines.append(f"  checkpoint  {checkpoint.path if checkpoint else 'none'}")
    lines.append(f"  metrics     {run_dir.metrics_rows}" + ("" if rows else " (no rows yet)"))
    lines.append(f"  logs        {run_dir.log('x').parent}")
    return lines


def _results(rows: list[Row], rollouts: list[Row]) -> list[str]:
    """Reward and evaluation, first and last."""
    results = []
    rewards = [row.values["rollout/raw_reward"] for row in rollouts if "rollout/raw_reward" in row.values]
    if rewards:
        results.append(f"reward      {_shown(rewards[0])} -> {_shown(rewards[-1])}")
    evals = [row for row in rows if row.axis == "eval/step"]
    for name in _eval_sets(evals):
        scores = [row.values[name] for row in evals if name in row.values]
        results.append(f"{name}  {_shown(scores[0])} -> {_shown(scores[-1])}")
    return results


def _eval_sets(evals: list[Row]) -> list[str]:
    """The names that carry a set's mean reward: `eval/SET`, without further parts."""
    names = {name for row in evals for name in row.values}
    derived = ("-truncated_ratio", "-none_reward_ratio", "-pass@")
    return sorted(
        name
        for name in names
        if name.count("/") == 1 and not any(part in name for part in derived) and "skipped_" not in name
    )


def _shown(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.3f}"
