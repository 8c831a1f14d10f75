"""The gRPC face of the rollout service: validates, calls, converts back. Decides nothing.

Answers UNAVAILABLE until the service is assembled. A failure is a status, never a field.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass
from typing import TypeVar

import grpc
import grpc.aio
import structlog

from furlong.telemetry import Telemetry
from furlong.v1 import rollout_pb2, rollout_pb2_grpc
from services.rollout.batch_store import KeptBatch
from services.rollout.batches import Batches
from services.rollout.evaluation import Evaluations
from services.rollout.fleet import Fleet, protos
from services.rollout.refusal import Refused
from services.rollout.reporting import Reporter
from services.rollout.weight_update import WeightUpdates

log = structlog.get_logger()

SERVICE = "furlong.v1.Rollout"
Context = grpc.aio.ServicerContext
T = TypeVar("T")

FLUSH_LIMIT_S = 1.0
"""Seconds that an answer waits at the most for its numbers to be on disk."""


@dataclass
class Parts:
    """The assembled service."""

    batches: Batches
    evaluations: Evaluations
    weights: WeightUpdates
    reporter: Reporter


class RolloutServicer(rollout_pb2_grpc.RolloutServicer):
    """Serves furlong.v1.Rollout."""

    def __init__(self, fleet: Fleet, telemetry: Telemetry) -> None:
        self._fleet = fleet
        self._telemetry = telemetry
        self.parts: Parts | None = None
        self.draining = False

    async def NextBatch(
        self, request: rollout_pb2.NextBatchRequest, context: Context
    ) -> AsyncIterator[rollout_pb2.NextBatchResponse]:
        batch, repeated = await _answered(context, self._next_batch(request))
        for group in batch.groups:
            yield rollout_pb2.NextBatchResponse(group=group)
        summary = rollout_pb2.BatchSummary()
        summary.CopyFrom(batch.summary)
        summary.repeated_answer = repeated
        yield rollout_pb2.NextBatchResponse(summary=summary)

    async def _next_batch(self, request: rollout_pb2.NextBatchRequest) -> tuple[KeptBatch, bool]:
        parts = self._assembled()
        served = self._fleet.ready(request.policy_version)
        return await parts.batches.next_batch(
            request.rollout_id, request.policy_version, weights_digest=parts.weights.weights_digest if served else ""
        )

    async def Evaluate(self, request: rollout_pb2.EvaluateRequest, context: Context) -> rollout_pb2.EvaluateResponse:
        async def work() -> rollout_pb2.EvaluateResponse:
            parts = self._assembled()
            answer = await parts.evaluations.evaluate(
                request.rollout_id,
                request.policy_version,
                attempt=parts.batches.attempt,
                weights_digest=parts.weights.weights_digest,
            )
            await self._flush()
            return answer

        return await _answered(context, work())

    async def BeginWeightUpdate(
        self, request: rollout_pb2.BeginWeightUpdateRequest, context: Context
    ) -> rollout_pb2.BeginWeightUpdateResponse:
        async def work() -> rollout_pb2.BeginWeightUpdateResponse:
            return await self._assembled().weights.begin(request)

        return await _answered(context, work())

    async def JoinWeightGroup(
        self, request: rollout_pb2.JoinWeightGroupRequest, context: Context
    ) -> rollout_pb2.JoinWeightGroupResponse:
        async def work() -> float:
            return await self._assembled().weights.join(request.update_id)

        return rollout_pb2.JoinWeightGroupResponse(seconds=await _answered(context, work()))

    async def ReceiveBucket(
        self, request: rollout_pb2.ReceiveBucketRequest, context: Context
    ) -> rollout_pb2.ReceiveBucketResponse:
        async def work() -> float:
            return await self._assembled().weights.receive(request.update_id, request.bucket_index)

        return rollout_pb2.ReceiveBucketResponse(seconds=await _answered(context, work()))

    async def CommitWeightUpdate(
        self, request: rollout_pb2.CommitWeightUpdateRequest, context: Context
    ) -> rollout_pb2.CommitWeightUpdateResponse:
        async def work() -> rollout_pb2.CommitWeightUpdateResponse:
            return await self._assembled().weights.commit(request)

        return await _answered(context, work())

    async def AbortWeightUpdate(
        self, request: rollout_pb2.AbortWeightUpdateRequest, context: Context
    ) -> rollout_pb2.AbortWeightUpdateResponse:
        async def work() -> None:
            await self._assembled().weights.abort(request.update_id, request.reason)

        await _answered(context, work())
        return rollout_pb2.AbortWeightUpdateResponse()

    async def SaveState(self, request: rollout_pb2.SaveStateRequest, context: Context) -> rollout_pb2.SaveStateResponse:
        async def work() -> bytes:
            state = self._assembled().batches.save(request.rollout_id)
            await self._assembled().reporter.settle()
            await self._flush()  # a checkpoint with this state may count from now on: its rollouts' numbers are on disk
            return state

        return rollout_pb2.SaveStateResponse(state=await _answered(context, work()))

    async def RestoreState(
        self, request: rollout_pb2.RestoreStateRequest, context: Context
    ) -> rollout_pb2.RestoreStateResponse:
        async def work() -> rollout_pb2.RestoreStateResponse:
            parts = self._assembled()
            state = request.state if request.HasField("state") else None
            attempt = max(1, request.attempt)
            await parts.reporter.finish()  # what is still under way belongs to the attempt before
            if attempt != parts.batches.attempt:
                parts.reporter.give_up_evaluation()
            warnings = await parts.batches.restore(state, request.next_rollout_id, attempt)
            parts.reporter.send_left_over(parts.batches.will_report)
            parts.weights.restart_versions(request.next_rollout_id)
            self._telemetry.attempt = attempt
            return rollout_pb2.RestoreStateResponse(warnings=warnings, num_groups_drawn=parts.batches.num_groups_drawn)

        return await _answered(context, work())

    async def _flush(self) -> None:
        """Wait until the metrics service has our records on disk. While it is away, the spool has them."""
        if self._telemetry.stats.connected:
            await asyncio.to_thread(self._telemetry.flush, FLUSH_LIMIT_S)

    async def CommitCheckpoint(
        self, request: rollout_pb2.CommitCheckpointRequest, context: Context
    ) -> rollout_pb2.CommitCheckpointResponse:
        async def work() -> None:
            self._assembled().batches.commit(request.rollout_id)

        await _answered(context, work())
        return rollout_pb2.CommitCheckpointResponse()

    async def GetStatus(
        self, request: rollout_pb2.GetRolloutStatusRequest, context: Context
    ) -> rollout_pb2.GetRolloutStatusResponse:
        parts = self.parts
        versions = [e.policy_version for e in self._fleet.engines if e.policy_version is not None]
        return rollout_pb2.GetRolloutStatusResponse(
            rollout_id=parts.batches.last_asked if parts else None,
            policy_version=max(versions, default=None),
            engines=protos(self._fleet.engines),
            num_groups_drawn=parts.batches.num_groups_drawn if parts else 0,
            phase=self._phase(),
        )

    def _phase(self) -> str:
        parts = self.parts
        if self.draining:
            return "draining"
        if parts is None:
            return "starting"
        if parts.batches.is_making:
            return "generating"
        if parts.evaluations.is_running:
            return "evaluating"
        return "updating_weights" if parts.weights.is_open else "idle"

    def _assembled(self) -> Parts:
        if self.parts is None or self.draining:
            state = "draining" if self.draining else "starting"
            raise Refused(grpc.StatusCode.UNAVAILABLE, f"the rollout service is {state}")
        return self.parts


async def _answered(context: Context, work: Awaitable[T]) -> T:
    """The result of the work, or the call ended with the status that the work was refused with."""
    try:
        return await work
    except Refused as error:
        log.warning("call_refused", code=error.code.name, reason=str(error))
        await context.abort(error.code, str(error))
        raise AssertionError("abort raises") from error
