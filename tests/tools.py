"""Where tests and benchmarks find the real programs that `make tools` fetches, and how they are started."""

import json
import os
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ROOT / ".tools"
VENV = ROOT / ".venv-tools"
APT = TOOLS / "apt"


@dataclass(frozen=True)
class Tool:
    """A program that is there."""

    command: tuple[str, ...]
    environment: dict[str, str]
    """Whole, for the process."""


def find(name: str) -> Tool | None:
    """One of `_commands`. None: it is not here."""
    command = _commands()[name]
    needed = [part for part in command[:2] if not part.startswith("-")]
    if command[1:2] == ["-m"]:
        needed.append(str(next(VENV.glob(f"lib/*/site-packages/{command[2]}"), VENV / command[2])))
    if not all(shutil.which(part) or Path(part).exists() for part in needed) or name in _missing():
        return None
    libraries = ":".join(str(path) for path in sorted(APT.glob("usr/lib/*-linux-gnu*")))
    more = {"LD_LIBRARY_PATH": libraries} if command[0].startswith(str(APT)) else {}
    return Tool(tuple(command), {**os.environ, **more})


def need(name: str) -> Tool:
    """The same; skips the test, saying why, when it is not here."""
    tool = find(name)
    if tool is None:
        pytest.skip(f"no {name}: {why_missing(name)}")
    return tool


def why_missing(name: str) -> str:
    """In words."""
    return _missing().get(name, "`make tools` fetches it")


def free_port() -> int:
    """A port that nobody listens on now, for a program that cannot tell which one it found."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _missing() -> dict[str, str]:
    """What `make tools` could not have here, and why."""
    try:
        reasons = json.loads((TOOLS / "missing.json").read_text())
    except (OSError, ValueError):
        return {}
    return {str(name): str(reason) for name, reason in reasons.items()}


def _commands() -> dict[str, list[str]]:
    modules = next(iter(APT.glob("usr/lib/*-linux-gnu*/rsyslog")), APT / "usr/lib/rsyslog")
    return {
        "prometheus": [str(APT / "usr/bin/prometheus")],
        "rsyslog": [str(APT / "usr/sbin/rsyslogd"), f"-M{modules}"],
        "statsd": ["node", str(TOOLS / "statsd/node_modules/statsd/stats.js")],
        "mlflow": [str(VENV / "bin/mlflow")],
        "tensorboard": [str(VENV / "bin/tensorboard")],
        "nginx": [str(APT / "usr/sbin/nginx")],
        "wrk": [str(APT / "usr/bin/wrk")],
        "sglang-router": [str(VENV / "bin/python"), "-m", "sglang_router"],  # each brings a script named smg
        "smg": [str(VENV / "bin/python"), "-m", "smg"],
        "fakeworker": [str(TOOLS / "fakeworker")],
    }
