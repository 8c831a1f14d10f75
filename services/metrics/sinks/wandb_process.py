"""The only file that imports wandb: a process of its own, so that nothing wandb does can stop the metrics service.

Reads JSON lines on stdin: first the run's settings, then batches of points `{"through": ID, "points": [...]}`; answers
each on stdout with `{"through": ID}` or `{"error": ...}`. When stdin ends, also because the service was killed, it
finishes the run, so that nothing is left in wandb's buffers, and leaves what it finished in a file.
"""

import contextlib
import fcntl
import json
import os
import secrets
import sys
import time
from pathlib import Path
from typing import IO, Any  # Any: wandb's own objects, and JSON

AXIS_PREFIXES = {
    "train/step": ("train",),
    "rollout/step": ("rollout", "perf", "multi_turn", "passrate"),
    "eval/step": ("eval",),
}


def main() -> int:
    """Run until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what wandb prints is no answer
    settings = json.loads(sys.stdin.readline() or "{}")
    if not settings:
        return 0
    folder = Path(settings["folder"])
    with _only_one(folder / "wandb.lock"):
        try:
            run = _begin(settings, folder)
        except Exception as error:  # whatever wandb raises: the service says it, and tries again
            _answer(answers, {"error": f"{type(error).__name__}: {error}"})
            raise
        _answer(answers, {"ready": run.id})
        through = _serve(run, answers)
        run.finish()
        _remember(folder / "wandb_finished", str(through))
        with contextlib.suppress(OSError):  # the service may be gone
            _answer(answers, {"finished": through})
    return 0


def _serve(run: Any, answers: IO[str]) -> int:
    """Take points until stdin ends; the last row that wandb took."""
    through = 0
    while line := sys.stdin.readline():
        if not line.endswith("\n"):
            break  # the service was killed in the middle
        batch = json.loads(line)
        try:
            for point in batch["points"]:
                if point["row"] > through:
                    run.log({name: _number(value) for name, value in point["values"].items()})
                    through = point["row"]
            through = max(through, batch["through"])
            answer = {"through": through}
        except Exception as error:  # whatever wandb raises: told, and tried again
            answer = {"through": through, "error": f"{type(error).__name__}: {error}"}
        with contextlib.suppress(OSError):
            _answer(answers, answer)
    return through


def _begin(settings: dict[str, Any], folder: Path) -> Any:
    key_file = os.environ.get("WANDB_API_KEY_FILE", "")
    if key_file and not os.environ.get("WANDB_API_KEY"):
        os.environ["WANDB_API_KEY"] = Path(key_file).read_text().strip()
    import wandb

    id_file = folder / "wandb_run_id"
    if not id_file.exists():
        _remember(id_file, secrets.token_hex(4))
    run = wandb.init(
        id=id_file.read_text().strip(),
        resume="allow",
        project=settings["project"],
        group=settings["group"] or None,
        entity=settings["team"] or None,
        name=settings["name"],
        dir=settings["dir"],
        mode=settings["mode"],
        config=settings["config"],
        settings=wandb.Settings(
            init_timeout=settings["init_timeout_s"],
            finish_timeout=settings["finish_timeout_s"],
            finish_timeout_raises=False,
            console="off",
            disable_code=True,
            disable_git=True,
            silent=True,
        ),
    )
    for axis, prefixes in AXIS_PREFIXES.items():
        run.define_metric(axis)
        for prefix in prefixes:
            run.define_metric(f"{prefix}/*", step_metric=axis)
    return run


def _number(value: object) -> object:
    """The strings for NaN and the infinities as floats, which wandb takes."""
    return float(value) if isinstance(value, str) else value


def _answer(answers: IO[str], answer: dict[str, object]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def _remember(path: Path, text: str) -> None:
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_text(text)
    scratch.replace(path)


class _only_one:
    """Waits, at most a minute, for the process of an earlier start to finish its run."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        self._file = self._path.open("w")
        deadline = time.monotonic() + 60
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def __exit__(self, *error: object) -> None:
        self._file.close()


if __name__ == "__main__":
    sys.exit(main())
