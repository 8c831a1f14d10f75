"""Tells when a service that was started can work: it has published its address and its health says SERVING.

A thread that only looks and reports; it decides nothing and never touches a process.
"""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from furlong import addresses
from furlong.rundir import RunDir

POLL_S = 0.1
CALL_TIMEOUT_S = 1.0


@dataclass(frozen=True)
class Ready:
    """An instance says SERVING."""

    instance: str
    address: str
    pid: int


@dataclass(frozen=True)
class Progress:
    """Something to tell while others are still waited for."""

    text: str


class ReadinessWatch:
    """Looks at every awaited instance until each is ready, and at those added later, until closed."""

    def __init__(self, run_dir: RunDir, pids: Mapping[str, int], report: Callable[[Ready | Progress], None]) -> None:
        """pids: instance -> pid of what we started. An address that another process published is not its."""
        self._run_dir = run_dir
        self._pending = dict(pids)
        self._lock = threading.Lock()
        self._report = report
        self._closed = threading.Event()
        self._change = threading.Event()
        self._engines: dict[str, str] = {}
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="readiness", daemon=True)
        self._thread.start()

    def add(self, instance: str, pid: int) -> None:
        """Look at one that was started again."""
        with self._lock:
            self._pending = {**self._pending, instance: pid}
        self._change.set()

    def close(self) -> None:
        """Look no more."""
        self._closed.set()
        self._change.set()

    def _run(self) -> None:
        try:
            while not self._closed.is_set():
                self._change.clear()
                pending = self._pending
                for instance, pid in pending.items():
                    self._look(instance, pid)
                if pending:
                    self._closed.wait(POLL_S)
                else:
                    self._change.wait()  # until one is added, or there is nothing more to look for
        except Exception as error:  # the top of the thread: who waits for it must hear of its end
            self._report(Progress(f"cannot tell who is ready any more: {error!r}"))

    def _look(self, instance: str, pid: int) -> None:
        from furlong.rpc import is_serving  # gRPC starts threads: not before all children are started

        entry = addresses.find(self._run_dir, instance)
        if entry is None or entry.pid != pid or entry.grpc is None:
            return
        if instance == "rollout":
            self._look_at_engines(entry.grpc)
        if is_serving(entry.grpc, "", timeout_s=CALL_TIMEOUT_S):
            with self._lock:
                if self._pending.get(instance) == pid:  # else it was started again meanwhile
                    self._pending = {name: other for name, other in self._pending.items() if name != instance}
            shown = ", ".join(part for part in (entry.grpc, entry.http) if part)
            self._report(Ready(instance, shown, pid))

    def _look_at_engines(self, address: str) -> None:
        """Engines take longest: say what each is doing."""
        import grpc

        from furlong.rpc import channel
        from furlong.v1 import rollout_pb2, rollout_pb2_grpc, weights_pb2

        words = {
            weights_pb2.ENGINE_STATE_STARTING: "loading...",
            weights_pb2.ENGINE_STATE_WAITING_FOR_WEIGHTS: "up, waiting for weights",
            weights_pb2.ENGINE_STATE_READY: "ready",
            weights_pb2.ENGINE_STATE_GONE: "gone",
        }
        with channel(address) as to_rollout:
            stub = rollout_pb2_grpc.RolloutStub(to_rollout)
            try:
                status = stub.GetStatus(rollout_pb2.GetRolloutStatusRequest(), timeout=CALL_TIMEOUT_S)
            except grpc.RpcError:  # not answering yet: looked at again at the next turn
                return
        for engine in status.engines:
            word = words.get(engine.state)
            if word and self._engines.get(engine.engine_id) != word:
                self._engines[engine.engine_id] = word
                took = "" if word == "loading..." else f" ({time.monotonic() - self._began:.1f} s)"
                self._report(Progress(f"{engine.engine_id} {word}{took}"))
