"""`furlong status --url`: how a metrics service is, and which runs it has, as it says over HTTP."""

from collections.abc import Mapping
from typing import Any

from furlong.asking.client import MetricsClient
from furlong.cli.lines import clean
from furlong.launch.look import InstanceStatus, RunStatus

TOLD = ("num_records", "num_rows", "num_rows_waiting")
LISTS = ("sinks", "files", "endpoints")

Tree = Mapping[str, Any]  # Any: JSON


def look_at_url(client: MetricsClient) -> tuple[RunStatus, list[Tree]]:
    """The service, and its runs. Raises Unreachable, Refused."""
    said, runs = client.get("/api/status"), client.get("/api/runs")["runs"]
    trouble = said.get("trouble") or said.get("store_error") or said.get("holding")
    counts = {key: value for key, value in said.items() if key.startswith("num_") and value}
    details = {**{key: said[key] for key in TOLD if key in said}, **({"trouble": trouble} if trouble else {}), **counts}
    details |= {key: said[key] for key in LISTS if said.get(key) or key == "sinks"}
    instance = InstanceStatus("metrics", "serving", http=client.url, details=details)
    return RunStatus("", client.url, None, [instance], [], None, 0, None), runs


def run_line(run: Tree) -> str:
    """For example `run arith: rollout/step 29, train/step 59; last heard of at 2026-11-29T17:03:41.123456Z`."""
    axes = ", ".join(f"{clean(axis)} {step}" for axis, step in run["axes"].items()) or "no rows"
    return f"run {clean(run['run'])}: {axes}; last heard of at {clean(str(run['last']))}"
