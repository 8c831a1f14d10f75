"""The control surface over gRPC, furlong.v1.Router, that the rollout service calls. Converts; decides nothing.

A router with a token wants it with every call.
"""

from collections.abc import AsyncIterator
from typing import NoReturn

import grpc
import grpc.aio

from furlong.v1 import router_pb2, router_pb2_grpc
from services.router.router import Router
from services.router.workers.urls import BadWorker
from services.router.workers.worker import DEFAULT_TYPE, Worker
from services.router.workers.workers import TooManyWorkers

NAME = "furlong.v1.Router"
NEED_TOKEN = (
    "send the router's token as metadata `authorization: Bearer TOKEN`; it stands in the file of --router-token-file"
)

Context = grpc.aio.ServicerContext


class RouterServicer(router_pb2_grpc.RouterServicer):
    """Answers the five calls."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._for_watchers: router_pb2.ListWorkersResponse | None = None
        """What each watcher gets of the last change: made once for all, since that takes 10 us a worker."""
        router.workers.on_change.append(self._forget_list)

    async def AddWorker(self, request: router_pb2.AddWorkerRequest, context: Context) -> router_pb2.AddWorkerResponse:
        await self._authorize(context)
        if request.worker_type not in ("", DEFAULT_TYPE):
            await _abort(context, grpc.StatusCode.INVALID_ARGUMENT, f"worker_type must be {DEFAULT_TYPE} or empty")
        try:
            worker = self._router.add(
                request.url,
                admit=request.admit_without_policy_version,
                labels=dict(request.labels),
                priority=request.priority,
                api_key=request.api_key or None,
            )
        except BadWorker as error:
            await _abort(context, grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except TooManyWorkers as error:
            await _abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        await self._router.settled()
        return router_pb2.AddWorkerResponse(worker=_message(worker))

    async def RemoveWorker(
        self, request: router_pb2.RemoveWorkerRequest, context: Context
    ) -> router_pb2.RemoveWorkerResponse:
        await self._authorize(context)
        if not self._router.remove(request.worker):
            await _not_found(context, request.worker)
        await self._router.settled()
        return router_pb2.RemoveWorkerResponse()

    async def ListWorkers(
        self, request: router_pb2.ListWorkersRequest, context: Context
    ) -> router_pb2.ListWorkersResponse:
        await self._authorize(context)
        return _list(self._router.workers.all())

    async def SetWorkerState(
        self, request: router_pb2.SetWorkerStateRequest, context: Context
    ) -> router_pb2.SetWorkerStateResponse:
        await self._authorize(context)
        worker = self._router.workers.registered(request.worker)
        if worker is None:
            await _not_found(context, request.worker)
        version = request.policy_version if request.HasField("policy_version") else None
        self._router.workers.set_state(worker, admit=request.admit, policy_version=version)
        await self._router.settled()
        return router_pb2.SetWorkerStateResponse(worker=_message(worker))

    async def WatchWorkers(
        self, request: router_pb2.WatchWorkersRequest, context: Context
    ) -> AsyncIterator[router_pb2.ListWorkersResponse]:
        await self._authorize(context)
        self._forget_list()  # a new one begins with the numbers of now
        async for _ in self._router.workers.changes():
            if self._for_watchers is None:
                self._for_watchers = _list(self._router.workers.all())
            yield self._for_watchers

    def _forget_list(self) -> None:
        self._for_watchers = None

    async def _authorize(self, context: Context) -> None:
        """End the call unless it brings the router's token, if there is one."""
        sent = [(name.encode(), _bytes(value)) for name, value in context.invocation_metadata() or ()]
        if not self._router.token.allows(sent):
            await _abort(context, grpc.StatusCode.UNAUTHENTICATED, NEED_TOKEN)


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


def _message(worker: Worker) -> router_pb2.Worker:
    return router_pb2.Worker(
        worker_id=worker.worker_id,
        url=str(worker.url),
        state=f"WORKER_STATE_{worker.state.name}",
        policy_version=worker.policy_version,
        num_in_flight=worker.in_flight,
        num_requests=worker.num_requests,
        num_failures=worker.num_failures,
        last_error=worker.last_error,
        labels=worker.labels,
        priority=worker.priority,
        worker_type=worker.worker_type,
        breaker=worker.breaker_state,
    )


def _list(workers: list[Worker]) -> router_pb2.ListWorkersResponse:
    return router_pb2.ListWorkersResponse(workers=[_message(worker) for worker in workers])


async def _not_found(context: Context, name: str) -> NoReturn:
    await _abort(context, grpc.StatusCode.NOT_FOUND, f"no worker has the id or address {name[:200]!r}")


async def _abort(context: Context, code: grpc.StatusCode, message: str) -> NoReturn:
    await context.abort(code, message)
    raise AssertionError("abort raises")
