"""A run that passes every check at start, made of files that only look like a model; for tests."""

from pathlib import Path

from furlong.config import load_config
from furlong.config.sections import RunConfig

TOML = """
[run]
name = "small"
run_dir = "{root}/run"
num_rollout = 3
rollout_batch_size = 2
n_samples_per_prompt = 2

[model]
hf_checkpoint = "{root}/model"

[rollout]
prompt_data = "{root}/prompts.jsonl"
rm_type = "last_number"
"""


def small_run(root: Path) -> Path:
    """Make the files; the path of the TOML."""
    (root / "model").mkdir()
    for name in ("config.json", "tokenizer.json"):
        (root / "model" / name).write_text("{}")
    (root / "prompts.jsonl").write_text('{"prompt": "1+1=", "label": "2"}\n')
    path = root / "run.toml"
    path.write_text(TOML.format(root=root))
    return path


def read(path: Path, *flags: str) -> RunConfig:
    """The run at a path with flags over it."""
    return load_config(str(path), flags, prog="furlong", description="")
