"""The router's gRPC as rollout calls it: found anew whenever it has moved, with the token, each call with a limit.

Decides nothing of engines; see router_link.py.
"""

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Mapping
from dataclasses import dataclass

import grpc
import grpc.aio

from furlong import addresses, rpc
from furlong.addresses import NotReachable
from furlong.config import RunConfig
from furlong.launch.routerfiles import token_metadata
from furlong.rundir import RunDir
from furlong.v1 import router_pb2, router_pb2_grpc

CALL_TIMEOUT_S = 5.0
REFUSED = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)

Workers = Mapping[str, router_pb2.Worker]
"""By url."""


class TokenRefused(NotReachable):
    """The router does not take our token, which asking again does not mend."""


@dataclass(frozen=True)
class RouterPlace:
    """Where the router listens."""

    grpc: str
    http: str


class RouterCalls:
    """Every call raises NotReachable or AioRpcError."""

    def __init__(self, config: RunConfig, run_dir: RunDir) -> None:
        self._config = config
        self._run_dir = run_dir
        self._channel: grpc.aio.Channel | None = None
        self.place: RouterPlace | None = None
        """Where it was when it was looked for last."""

    async def find(self) -> bool:
        """Look for it; whether it is at another place than before."""
        place = self._look_up()
        if place == self.place:
            return False
        if self._channel is not None:
            await self._channel.close()
        self._channel, self.place = rpc.aio_channel(place.grpc), place
        return True

    async def workers(self) -> dict[str, router_pb2.Worker]:
        """All workers, by url."""
        request = router_pb2.ListWorkersRequest()
        with self._telling():
            known = await self._stub().ListWorkers(request, timeout=CALL_TIMEOUT_S, metadata=self._token())
        return _by_url(known)

    async def add(self, url: str, *, labels: Mapping[str, str]) -> None:
        """Register a worker that takes no request until a policy version of it is confirmed."""
        request = router_pb2.AddWorkerRequest(url=url, admit_without_policy_version=False, labels=labels)
        with self._telling():
            await self._stub().AddWorker(request, timeout=CALL_TIMEOUT_S, metadata=self._token())

    async def set_state(self, url: str, *, admit: bool, policy_version: int | None) -> bool:
        """Set admission and version; whether there is such a worker."""
        request = router_pb2.SetWorkerStateRequest(worker=url, admit=admit, policy_version=policy_version)
        with self._telling(), _found() as found:
            await self._stub().SetWorkerState(request, timeout=CALL_TIMEOUT_S, metadata=self._token())
            found.append(url)
        return bool(found)

    async def remove(self, url: str) -> None:
        """Take a worker out, if it is there."""
        request = router_pb2.RemoveWorkerRequest(worker=url)
        with self._telling(), _found():
            await self._stub().RemoveWorker(request, timeout=CALL_TIMEOUT_S, metadata=self._token())

    async def watch(self) -> AsyncGenerator[dict[str, router_pb2.Worker]]:
        """All workers now and after every change, until the router is gone. No limit: keepalive notices a dead one."""
        place = self._look_up()
        async with rpc.aio_channel(place.grpc) as channel:  # its own: `find` may close the other at any time
            stub = router_pb2_grpc.RouterStub(channel)
            stream: AsyncIterator[router_pb2.ListWorkersResponse] = stub.WatchWorkers(  # pyrefly: ignore
                router_pb2.WatchWorkersRequest(), metadata=self._token()
            )
            with self._telling():
                async for answer in stream:
                    yield _by_url(answer)

    async def close(self) -> None:
        """Hang up."""
        if self._channel is not None:
            await self._channel.close()

    def _look_up(self) -> RouterPlace:
        given = self._config.router.router_addr
        if given:
            http, _, grpc_address = given.partition(",")
            return RouterPlace(grpc_address, http.rstrip("/"))
        entry = addresses.find(self._run_dir, "router")
        if entry is None or entry.grpc is None or entry.http is None:
            raise NotReachable(f"no live router in {self._run_dir.addresses}")
        return RouterPlace(entry.grpc, entry.http.rstrip("/"))

    def _token(self) -> tuple[tuple[str, str], ...]:
        """Read anew for each call, so that it can be changed while the run goes on."""
        return token_metadata(self._config.router.router_token_file)

    def _stub(self) -> "router_pb2_grpc.RouterAsyncStub":
        assert self._channel is not None
        return router_pb2_grpc.RouterStub(self._channel)  # pyrefly: ignore

    @contextlib.contextmanager
    def _telling(self) -> Generator[None]:
        """A refused token in words."""
        try:
            yield
        except grpc.aio.AioRpcError as error:
            if error.code() not in REFUSED:
                raise
            file = self._config.router.router_token_file
            what = f"the token in {file}" if file else "no token, which --router-token-file FILE gives"
            raise TokenRefused(f"the router refuses calls with {what}: {words(error)}") from error


@contextlib.contextmanager
def _found() -> Generator[list[str]]:
    """Takes NOT_FOUND for an answer: then what it gave stays empty."""
    try:
        yield []
    except grpc.aio.AioRpcError as error:
        if error.code() != grpc.StatusCode.NOT_FOUND:
            raise


def _by_url(answer: router_pb2.ListWorkersResponse) -> dict[str, router_pb2.Worker]:
    return {worker.url: worker for worker in answer.workers}


def version_of(worker: router_pb2.Worker) -> int | None:
    """The policy version that the router knows of a worker."""
    return worker.policy_version if worker.HasField("policy_version") else None


def words(error: Exception) -> str:
    """What went wrong, for people."""
    return f"{error.code().name}: {error.details()}" if isinstance(error, grpc.aio.AioRpcError) else str(error)
