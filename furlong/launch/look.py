"""Looks at a run from outside: which of its services live and serve, and what they say of themselves.

Asks with short limits and never waits for a service to come; a run that is dead is looked at just as well.
"""

import json
import os
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from furlong import addresses
from furlong.addresses import Address
from furlong.config import ConfigError, RunConfig, load_resolved
from furlong.config.errors import Problem
from furlong.launch import shared
from furlong.launch.checkpoints import newest_checkpoint
from furlong.launch.lock import Started, is_locked, read_started
from furlong.launch.plan import ChildPlan, plan_children
from furlong.launch.routerfiles import token_metadata
from furlong.launch.rows import Row, read_rows
from furlong.rundir import RunDir

if TYPE_CHECKING:
    from google.protobuf.message import Message

CALL_TIMEOUT_S = 1.0
UP = ("serving", "running")


@dataclass(frozen=True)
class InstanceStatus:
    """One instance, as seen now."""

    instance: str
    state: str
    """serving; running (lives, and serves nothing of its own); starting (lives, and does not serve yet); stopping
    (lives, and does not serve any more); gone. Engines have words of their own."""
    pid: int | None = None
    uptime_s: float | None = None
    grpc: str | None = None
    http: str | None = None
    details: Mapping[str, object] = field(default_factory=dict)
    """What it says of itself: rollout_id, policy_version, phase and the like."""


@dataclass(frozen=True)
class RunStatus:
    """A run, as seen now."""

    run: str
    """Empty: it is a service alone, the one instance."""
    run_dir: str
    supervised_by: int | None
    """Pid of the `furlong up` that watches it; None: nothing does."""
    instances: list[InstanceStatus]
    engines: list[InstanceStatus]
    last_checkpoint: int | None
    """Rollout id of the newest complete checkpoint."""
    num_rollout: int
    """Rollouts that the run is to train."""
    last_row: Mapping[str, object] | None
    """The newest row of the axis rollout/step."""
    last_row_unknown: str = ""
    """Why a metrics service that is shared did not tell it."""

    def is_done(self) -> bool:
        """Whether everything is trained and saved."""
        return self.last_checkpoint is not None and self.last_checkpoint + 1 >= self.num_rollout

    def all_up(self) -> bool:
        """Whether everything that the run needs is there."""
        return all(item.state in UP for item in self.instances) and all(e.state == "ready" for e in self.engines)


def look_at(run_dir: RunDir) -> RunStatus:
    """Gather everything. Raises ConfigError when there is no run in the directory."""
    if not run_dir.config.is_file():
        for service, folder in (("metrics", run_dir.metrics_store), ("router", run_dir.router_state.parent)):
            if folder.is_dir():
                return _look_at_alone(service, run_dir)
        rule = "must be a run directory: it holds no config.toml"
        raise ConfigError([Problem("--run-dir", str(run_dir.root), rule, "Give the --run-dir of `furlong up`.")])
    config = load_resolved(run_dir.config)
    entries, started, supervised = addresses.read_addresses(run_dir), read_started(run_dir), is_locked(run_dir)
    unready = "stopping" if supervised and started and started.stopping else "starting"
    plans = plan_children(config, config_path=run_dir.config, parent_pid=os.getpid(), environment={})
    rollout = entries.get("rollout")
    checkpoint = newest_checkpoint(run_dir)
    row, trouble = _last_row(config, run_dir)
    return RunStatus(
        run=config.run.name,
        run_dir=str(run_dir.root),
        supervised_by=started.pid if started and supervised else None,
        instances=[_look_at_instance(plan, entries.get(plan.instance), started, unready) for plan in plans],
        engines=_engines(rollout.grpc) if rollout and rollout.grpc and rollout.alive() else [],
        last_checkpoint=checkpoint.rollout_id if checkpoint else None,
        num_rollout=config.run.num_rollout,
        last_row={"step": row.step, **row.values} if row else None,
        last_row_unknown=trouble,
    )


def _last_row(config: RunConfig, run_dir: RunDir) -> tuple[Row | None, str]:
    """The newest row of the axis rollout/step, and why it cannot be told."""
    if not config.metrics.metrics_addr:
        rows = [row for row in read_rows(run_dir.metrics_rows) if row.axis == "rollout/step"]
        return (rows[-1] if rows else None), ""
    try:
        return shared.last_row(config.metrics.metrics_addr, config.run.name), ""
    except shared.NotAnswered as error:
        return None, f"{error}"


def _look_at_alone(service: str, run_dir: RunDir) -> RunStatus:
    """A service that belongs to no run."""
    plan = ChildPlan(service, service, (), {})
    instance = _look_at_instance(plan, addresses.find(run_dir, service), None, "starting")
    return RunStatus("", str(run_dir.root), None, [instance], [], None, 0, None)


def _look_at_instance(plan: ChildPlan, entry: Address | None, started: Started | None, unready: str) -> InstanceStatus:
    """unready: the word for an instance that lives and does not serve."""
    if entry and entry.alive():
        uptime_s = time.time() - entry.process_started
        state, details = _ask(plan.service, entry, entry.grpc, unready) if entry.grpc else _ask_http(entry.http)
        return InstanceStatus(plan.instance, state, entry.pid, uptime_s, entry.grpc, entry.http, details)
    child = started.children.get(plan.instance) if started else None
    if child is None or not child.alive():
        return InstanceStatus(plan.instance, "gone")
    state = unready if plan.awaited else "running"
    return InstanceStatus(plan.instance, state, child.pid, time.time() - child.process_started)


def _ask(service: str, entry: Address, address: str, unready: str) -> tuple[str, dict[str, object]]:
    """Its state by its health, and what it says of itself."""
    import grpc

    from furlong.rpc import is_serving

    if not is_serving(address, "", timeout_s=CALL_TIMEOUT_S):
        return unready, {}
    asked: Mapping[str, Callable[[str], dict[str, object]]] = {
        "metrics": _ask_metrics,
        "router": lambda address: _ask_router(address, token_metadata(entry.extra.get("token_file", ""))),
        "rollout": _ask_rollout,
        "trainer": _ask_trainer,
    }
    try:
        return "serving", asked[service](address)
    except grpc.RpcError as error:
        code = error.code().name if isinstance(error, grpc.Call) else "error"
        return "serving", {"status": f"did not say ({code})"}


def _ask_http(http: str | None) -> tuple[str, dict[str, object]]:
    """The same of a service without gRPC, a router alone: what it says to everybody, so that it is sent no secret."""
    if not http:
        return "running", {}
    unchecked = ssl.create_default_context()
    unchecked.check_hostname, unchecked.verify_mode = False, ssl.CERT_NONE
    handlers = urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=unchecked)
    try:
        with urllib.request.build_opener(*handlers).open(f"{http}/readyz", timeout=CALL_TIMEOUT_S) as answer:
            return "serving", {"num_ready": json.loads(answer.read())["num_ready_workers"]}
    except urllib.error.HTTPError as error:
        return "serving", {"num_ready": 0} if error.code == 503 else {"status": f"answered {error.code}"}
    except (OSError, ValueError, KeyError) as error:
        return "running", {"status": f"did not say ({error})"}


def _ask_metrics(address: str) -> dict[str, object]:
    from furlong.rpc import channel
    from furlong.v1 import metrics_pb2, metrics_pb2_grpc

    with channel(address) as to_metrics:
        stub = metrics_pb2_grpc.MetricsStub(to_metrics)
        answer = stub.GetStatus(metrics_pb2.GetMetricsStatusRequest(), timeout=CALL_TIMEOUT_S)
    sinks = [
        {
            "name": sink.name,
            "state": sink.state,
            "num_rows_behind": sink.num_rows_behind,
            "seconds_behind": round(sink.seconds_behind, 1),
            "last_error": sink.last_error,
            "num_rows_refused": sink.num_rows_refused,
            "num_values_left_out": sink.num_values_left_out,
        }
        for sink in answer.sinks
    ]
    told: dict[str, object] = {"num_records": answer.num_records, "num_rows": answer.num_rows}
    if answer.trouble:
        told["trouble"] = answer.trouble
    following = {"files": _told(answer.files), "endpoints": _told(answer.endpoints)}
    shown = {name: items for name, items in following.items() if items}
    return {**told, **dict(sorted(answer.counts.items())), "sinks": sinks, **shown}


def _told(messages: "Sequence[Message]") -> list[dict[str, object]]:
    """Messages of plain fields as they are."""
    return [{field.name: getattr(item, field.name) for field in item.DESCRIPTOR.fields} for item in messages]


def _ask_router(address: str, token: tuple[tuple[str, str], ...]) -> dict[str, object]:
    from furlong.rpc import channel
    from furlong.v1 import router_pb2, router_pb2_grpc

    with channel(address) as to_router:
        stub = router_pb2_grpc.RouterStub(to_router)
        workers = stub.ListWorkers(router_pb2.ListWorkersRequest(), timeout=CALL_TIMEOUT_S, metadata=token).workers
    ready = sum(worker.state == router_pb2.WORKER_STATE_READY for worker in workers)
    in_flight = sum(worker.num_in_flight for worker in workers)
    return {"num_workers": len(workers), "num_ready": ready, "num_in_flight": in_flight}


def _ask_rollout(address: str) -> dict[str, object]:
    from furlong.rpc import channel
    from furlong.v1 import rollout_pb2, rollout_pb2_grpc

    with channel(address) as to_rollout:
        stub = rollout_pb2_grpc.RolloutStub(to_rollout)
        answer = stub.GetStatus(rollout_pb2.GetRolloutStatusRequest(), timeout=CALL_TIMEOUT_S)
    given = {key: getattr(answer, key) for key in ("rollout_id", "policy_version") if answer.HasField(key)}
    return {"phase": answer.phase, **given}


def _ask_trainer(address: str) -> dict[str, object]:
    from furlong.rpc import channel
    from furlong.v1 import trainer_pb2, trainer_pb2_grpc

    with channel(address) as to_trainer:
        stub = trainer_pb2_grpc.TrainerStub(to_trainer)
        answer = stub.GetStatus(trainer_pb2.GetTrainerStatusRequest(), timeout=CALL_TIMEOUT_S)
    given = {"rollout_id": answer.rollout_id} if answer.HasField("rollout_id") else {}
    sizes = {"num_rollout": answer.num_rollout, "policy_version": answer.policy_version}
    return {"phase": answer.phase, "phase_seconds": round(answer.phase_seconds, 1), **given, **sizes}


def _engines(address: str) -> list[InstanceStatus]:
    import grpc

    from furlong.rpc import channel
    from furlong.v1 import rollout_pb2, rollout_pb2_grpc, weights_pb2

    with channel(address) as to_rollout:
        stub = rollout_pb2_grpc.RolloutStub(to_rollout)
        try:
            answer = stub.GetStatus(rollout_pb2.GetRolloutStatusRequest(), timeout=CALL_TIMEOUT_S)
        except grpc.RpcError:  # told by the rollout's own line
            return []
    found = []
    for engine in answer.engines:
        word = weights_pb2.EngineState.Name(engine.state).removeprefix("ENGINE_STATE_").lower()
        version = {"policy_version": engine.policy_version} if engine.HasField("policy_version") else {}
        pid = engine.pid if engine.HasField("pid") else None
        found.append(InstanceStatus(engine.engine_id, word, pid, _uptime(pid), None, engine.url, version))
    return found


def _uptime(pid: int | None) -> float | None:
    import psutil

    try:
        return time.time() - psutil.Process(pid).create_time() if pid else None
    except psutil.Error:
        return None
