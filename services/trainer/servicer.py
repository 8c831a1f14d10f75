"""The gRPC service Trainer: where the loop is, and the way to end it in peace. Rank 0 serves it; it decides nothing."""

import time

import grpc

from furlong.process import ExitCode, StopSignal
from furlong.v1 import trainer_pb2, trainer_pb2_grpc
from services.trainer.status import Status

SERVICE = "furlong.v1.Trainer"


class TrainerServicer(trainer_pb2_grpc.TrainerServicer):
    """See protos/furlong/v1/trainer.proto."""

    def __init__(self, status: Status, stop: StopSignal, *, num_rollout: int, world_size: int) -> None:
        self._status, self._stop = status, stop
        self._num_rollout, self._world_size = num_rollout, world_size

    def GetStatus(
        self, request: trainer_pb2.GetTrainerStatusRequest, context: grpc.ServicerContext
    ) -> trainer_pb2.GetTrainerStatusResponse:
        now = self._status.snapshot()
        return trainer_pb2.GetTrainerStatusResponse(
            rollout_id=now.rollout_id,
            num_rollout=self._num_rollout,
            policy_version=now.policy_version,
            train_step=now.train_step,
            phase="stopping" if self._stop.requested.is_set() else now.phase,
            phase_seconds=time.monotonic() - now.phase_since,
            checkpoint_rollout_id=now.checkpoint_rollout_id,
            world_size=self._world_size,
        )

    def RequestStop(
        self, request: trainer_pb2.RequestStopRequest, context: grpc.ServicerContext
    ) -> trainer_pb2.RequestStopResponse:
        code = ExitCode.DIVERGED if request.diverged else ExitCode.DRAINED
        self._stop.request(request.reason or "RequestStop", code=code)
        return trainer_pb2.RequestStopResponse()
