"""The last lines of `furlong up`: how the run went, where its results are, and how to go on."""

import shlex
import time
from pathlib import Path

from furlong.config import RunConfig
from furlong.launch import shared as shared_service
from furlong.launch.alerts import Fired, read_fired
from furlong.launch.checkpoints import newest_checkpoint
from furlong.launch.rows import Row, read_rows
from furlong.launch.supervisor import Ending
from furlong.process import ExitCode
from furlong.rundir import RunDir
from furlong.spool import waiting

HEADS = {
    ExitCode.DONE: "done",
    ExitCode.DRAINED: "stopped as asked",
    ExitCode.DIVERGED: "stopped: training diverged",
    ExitCode.KILLED: "stopped at once",
    ExitCode.HALTED: "stopped for an alert",
}
SAVED = (ExitCode.DONE, ExitCode.DRAINED, ExitCode.HALTED)
"""Endings at which everything that was trained is in the newest checkpoint."""
POINTLESS_TO_REPEAT = (ExitCode.DONE, ExitCode.DIVERGED, ExitCode.BAD_CONFIG)


def closing_lines(config: RunConfig, run_dir: RunDir, ending: Ending, *, seconds: float, again: str) -> list[str]:
    """What a person wants to know when a run has ended, however it did. again: the command that goes on."""
    rows, unknown = _rows(config, run_dir)
    checkpoint = newest_checkpoint(run_dir)
    num_saved = checkpoint.rollout_id + 1 if checkpoint else 0
    num_trained = max([num_saved, *(row.step + 1 for row in rows if row.axis == "rollout/step")])
    if ending.code in SAVED and checkpoint:  # rows beyond it are of an attempt that was killed
        num_trained = num_saved
    head = next((text for code, text in HEADS.items() if code == ending.code), "failed")
    lost = f", {num_saved} of them saved" if num_saved < num_trained and ending.code not in SAVED else ""
    lines = [f"{head}: {num_trained} of {config.run.num_rollout} rollouts{lost}; this start took {seconds:.1f} s"]
    if ending.code in (ExitCode.DRAINED, ExitCode.HALTED) and ending.reason:
        lines.append(f"  {ending.reason}")
    facts = _results([row for row in rows if row.step < num_trained])
    facts.append(("checkpoint", str(checkpoint.path) if checkpoint else "none"))
    fired = read_fired(run_dir.alerts, since_us=int((time.time() - seconds) * 1e6))
    if fired:
        facts.append(("alerts", f"{', '.join(map(_fired, fired))}; see {run_dir.alerts}"))
    own = str(run_dir.metrics_rows) + ("" if rows else " (no rows yet)")
    shared = config.metrics.metrics_addr
    if shared:
        own = f"with the service at {shared}, as run {config.run.name}" + (f"; {unknown}" if unknown else "")
    facts.append(("metrics", own))
    facts += _not_taken_in(config, run_dir, ending)
    if config.metrics.use_wandb:
        facts.append(("wandb", _wandb(Path(config.metrics.wandb_dir or run_dir.root, "wandb"))))
    facts.append(("logs", str(run_dir.log("x").parent)))
    if ending.code not in POINTLESS_TO_REPEAT:
        facts.append(("go on with", again))
    width = max(len(name) for name, _ in facts)
    return lines + [f"  {name.ljust(width)}  {value}" for name, value in facts]


def _rows(config: RunConfig, run_dir: RunDir) -> tuple[list[Row], str]:
    """The run's rows, of a service that is shared only what is told here; and why that did not tell them."""
    if not config.metrics.metrics_addr:
        return read_rows(run_dir.metrics_rows), ""
    try:
        return shared_service.results(config.metrics.metrics_addr, config.run.name), ""
    except shared_service.NotAnswered as error:
        return [], f"what came of it is not known now: {error}"


def _results(rows: list[Row]) -> list[tuple[str, str]]:
    """Reward and evaluation, first and last."""
    results = []
    rollouts = [row for row in rows if row.axis == "rollout/step"]
    rewards = [row.values["rollout/raw_reward"] for row in rollouts if "rollout/raw_reward" in row.values]
    if rewards:
        results.append(("reward", f"{_shown(rewards[0])} -> {_shown(rewards[-1])}"))
    evals = [row for row in rows if row.axis == "eval/step"]
    for name in _eval_sets(evals):
        scores = [row.values[name] for row in evals if name in row.values]
        results.append((name, f"{_shown(scores[0])} -> {_shown(scores[-1])}"))
    return results


def _not_taken_in(config: RunConfig, run_dir: RunDir, ending: Ending) -> list[tuple[str, str]]:
    """What the metrics service has not taken in or handed on, and how that is brought about."""
    kept = {name: count for name, count in waiting(run_dir.spool).items() if name != "metrics"}  # its own last words
    if not kept and not ending.metrics:
        return []
    num_kept = sum(kept.values())
    what = f"{num_kept} records of {', '.join(sorted(kept))} wait in {run_dir.spool}" if kept else "rows may be missing"
    why = f", since {ending.metrics}" if ending.metrics else ""
    if config.metrics.metrics_addr:
        remedy = (
            f"the same `furlong up` again, also of a run that is done: it hands them to {config.metrics.metrics_addr}"
        )
    else:
        command = shlex.join(["furlong", "metrics", "--config", str(run_dir.config)])
        remedy = f"{command}; Ctrl-C ends it once all is in metrics.jsonl and the sinks"
    return [("not complete", what + why), ("complete with", remedy)]


def _fired(one: Fired) -> str:
    times = f" {one.times} times" if one.times > 1 else ""
    return f"{one.rule} ({one.severity}{times}{', still' if one.still else ''})"


def _wandb(folder: Path) -> str:
    """Where wandb's files are; without a key they wait there to be uploaded."""
    if not folder.is_dir():
        return "nothing was written; see the log of metrics"
    if any(folder.glob("offline-run-*")):
        return f"offline; to upload, with WANDB_API_KEY set: wandb sync {folder}/offline-run-*"
    return str(folder)


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
