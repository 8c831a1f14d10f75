"""Calls to the rollout service, each with a deadline. Converts and nothing more: retries and recovery stand in session.

Never waits without a limit, and never inside a collective.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from furlong import rpc
from furlong.v1 import rollout_pb2, rollout_pb2_grpc, sample_pb2

SERVICE = "furlong.v1.Rollout"
LONGEST_ROLLOUT_S = 24 * 3600.0
"""Deadline of one rollout or evaluation. A dead service is noticed by keepalive in less than a minute."""


COMMIT_LIMIT_S = 5.0
"""Deadline of what rollout need not hear."""


class StoppedWaiting(Exception):
    """A stop was asked for while rollout was waited for."""


@dataclass(frozen=True)
class Received:
    """The samples of one rollout."""

    groups: Sequence[sample_pb2.Group]
    summary: rollout_pb2.BatchSummary


class RolloutClient:
    """One connection to one rollout process."""

    def __init__(self, address: str, *, call_timeout_s: float) -> None:
        self.address = address
        self._timeout_s = call_timeout_s
        self._channel = rpc.channel(address)
        self.stub = rollout_pb2_grpc.RolloutStub(self._channel)

    def close(self) -> None:
        self._channel.close()

    def next_batch(self, rollout_id: int, policy_version: int, *, give_up: threading.Event) -> Received:
        """All groups and the summary. Raises grpc.RpcError, or StoppedWaiting once give_up is set."""
        request = rollout_pb2.NextBatchRequest(rollout_id=rollout_id, policy_version=policy_version)
        call = self.stub.NextBatch(request, timeout=LONGEST_ROLLOUT_S)
        groups: list[sample_pb2.Group] = []
        summary: list[rollout_pb2.BatchSummary] = []
        finished = threading.Event()
        errors: list[grpc.RpcError] = []

        def read() -> None:
            try:
                for part in call:
                    if part.HasField("group"):
                        groups.append(part.group)
                    else:
                        summary.append(part.summary)
            except grpc.RpcError as error:
                errors.append(error)
            finally:
                finished.set()

        threading.Thread(target=read, name="next-batch", daemon=True).start()
        while not finished.wait(0.1):
            if give_up.is_set():
                call.cancel()
                raise StoppedWaiting
        if errors:
            raise errors[0]
        return Received(groups, _complete(groups, summary, rollout_id))

    def evaluate(
        self, rollout_id: int, policy_version: int, *, give_up: threading.Event
    ) -> rollout_pb2.EvaluateResponse:
        """Raises grpc.RpcError, or StoppedWaiting once give_up is set."""
        request = rollout_pb2.EvaluateRequest(rollout_id=rollout_id, policy_version=policy_version)
        call = self.stub.Evaluate.future(request, timeout=LONGEST_ROLLOUT_S)
        finished = threading.Event()
        call.add_done_callback(lambda done: finished.set())
        while not finished.wait(0.1):
            if give_up.is_set():
                call.cancel()
                raise StoppedWaiting
        return call.result()

    def save_state(self, rollout_id: int) -> bytes:
        request = rollout_pb2.SaveStateRequest(rollout_id=rollout_id)
        return self.stub.SaveState(request, timeout=self._timeout_s).state

    def restore_state(self, state: bytes | None, *, next_rollout_id: int, attempt: int) -> Sequence[str]:
        """The warnings for the user."""
        request = rollout_pb2.RestoreStateRequest(state=state, next_rollout_id=next_rollout_id, attempt=attempt)
        return list(self.stub.RestoreState(request, timeout=self._timeout_s).warnings)

    def commit_checkpoint(self, rollout_id: int) -> None:
        request = rollout_pb2.CommitCheckpointRequest(rollout_id=rollout_id)
        self.stub.CommitCheckpoint(request, timeout=min(self._timeout_s, COMMIT_LIMIT_S))


class TornBatch(Exception):
    """A batch ended without what it must hold."""


def _complete(
    groups: Sequence[sample_pb2.Group], summary: Sequence[rollout_pb2.BatchSummary], rollout_id: int
) -> rollout_pb2.BatchSummary:
    if len(summary) != 1:
        raise TornBatch(f"rollout {rollout_id}: the stream ended with {len(summary)} summaries, must be 1")
    if summary[0].num_groups != len(groups) or summary[0].rollout_id != rollout_id:
        raise TornBatch(
            f"rollout {rollout_id}: the summary tells of rollout {summary[0].rollout_id} with {summary[0].num_groups} "
            f"groups, but {len(groups)} came"
        )
    return summary[0]
