"""Where tests and benchmarks find the real SGLang: what `make sglang` made, or what the environment names in its place.

| variable | it names |
|---|---|
| FURLONG_TEST_SGLANG_PYTHON | the Python of an environment with SGLang |
| FURLONG_TEST_SGLANG_LAUNCHER | the script that starts it; empty: SGLang's own `-m sglang.launch_server` |
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MADE = ROOT / ".venv-sglang"
LAUNCHER = ROOT / "deploy/sglang-cpu/launch.py"
MISSING = "there is no SGLang here: `make sglang` makes .venv-sglang"


@dataclass(frozen=True)
class SglangEnvironment:
    """What SGLang is started with."""

    python: str
    launcher: str
    """Empty: SGLang's own."""

    @property
    def flags(self) -> list[str]:
        """For `furlong up`."""
        return ["--rollout-engine=sglang", f"--sglang-python={self.python}", f"--sglang-launcher={self.launcher}"]


def find_sglang(environment: Mapping[str, str] = os.environ) -> SglangEnvironment | None:
    """None: there is none. Raises FileNotFoundError when one is named that is not there: a typo must not skip tests."""
    launcher = environment.get("FURLONG_TEST_SGLANG_LAUNCHER", str(LAUNCHER))
    named = environment.get("FURLONG_TEST_SGLANG_PYTHON", "")
    if named and not Path(named).is_file():
        raise FileNotFoundError(f"FURLONG_TEST_SGLANG_PYTHON={named} must be a Python; unset it, or `make sglang`")
    made = MADE / "bin/python" if (MADE / ".ready").is_file() else None
    python = named or (str(made) if made else "")
    return SglangEnvironment(python, launcher) if python else None
