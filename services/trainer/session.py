"""The trainer's relation to the rollout service, which may be killed and started again at any moment.

Owns what a new rollout process must be told to go on: the state as of the last batch, and the weights. Each action is
tried again once that is done; what cannot be mended in the time that a start may take is PeerLost.
"""

import threading
import time
from collections.abc import Callable
from typing import TypeVar

import grpc
import structlog

from furlong import addresses, rpc
from furlong.addresses import NotReachable
from furlong.config import RunConfig
from furlong.rundir import RunDir
from furlong.v1 import rollout_pb2
from services.trainer.publisher import Published, Publisher
from services.trainer.ranks import PeerLost
from services.trainer.rollout_client import SERVICE, Received, RolloutClient, StoppedWaiting, TornBatch

log = structlog.get_logger()

MENDABLE = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNKNOWN,  # a stream cut by a killed peer
)
MAX_MENDS = 5
"""Times that one action is tried again before it counts as failed."""

Answer = TypeVar("Answer")


class RolloutFailed(Exception):
    """The rollout service answers, but cannot do what is asked; the text has its reason."""


class Session:
    """Rollout, whichever process it is just now."""

    def __init__(self, config: RunConfig, run_dir: RunDir, publisher: Publisher, *, attempt: int) -> None:
        self._config, self._run_dir, self._publisher = config, run_dir, publisher
        self._attempt = attempt
        self._client: RolloutClient | None = None
        self._state: bytes | None = None
        self._next_rollout_id = 0
        self._served: tuple[RolloutClient, int, Published] | None = None
        """Whom we last gave the weights, as which version."""

    @property
    def state(self) -> bytes:
        """Rollout's state as of the last batch taken, or as restored."""
        return self._state or b""

    def begin(self, state: bytes | None, *, next_rollout_id: int) -> Published:
        """Connect, restore, publish the weights: the start of a run or of a resume."""
        self._state, self._next_rollout_id = state, next_rollout_id
        return self._mending(self._bring_up, connect=False, give_up=threading.Event())

    def next_batch(self, rollout_id: int, *, give_up: threading.Event) -> Received:
        """The samples of a rollout; rollout's state after it is kept, for a checkpoint or a new rollout process."""
        received, state = self._mending(lambda client: self._take(client, rollout_id, give_up), give_up=give_up)
        self._state, self._next_rollout_id = state, rollout_id + 1
        return received

    def publish(self, version: int, *, give_up: threading.Event) -> Published:
        """Give the engines the weights as `version`: the next rollout's id, since each rollout makes one version."""
        assert version == self._next_rollout_id

        def send(client: RolloutClient) -> Published:
            if self._served is not None and self._served[:2] == (client, version):
                return self._served[2]  # mending has just done it
            return self._publish(client, version)

        return self._mending(send, give_up=give_up)

    def _publish(self, client: RolloutClient, version: int) -> Published:
        published = self._publisher.publish(client, version)
        self._served = (client, version, published)
        return published

    def evaluate(
        self, rollout_id: int, policy_version: int, *, give_up: threading.Event
    ) -> rollout_pb2.EvaluateResponse:
        """Have the weights evaluated, however long that takes."""
        return self._mending(
            lambda client: client.evaluate(rollout_id, policy_version, give_up=give_up), give_up=give_up
        )

    def commit_checkpoint(self, rollout_id: int) -> None:
        """Tell rollout that a checkpoint is durable. Rollout being away does no harm: it keeps more than it needs."""
        if self._client is None:
            log.warning("checkpoint_commit_not_told", rollout_id=rollout_id, reason="no rollout service")
            return
        try:
            self._client.commit_checkpoint(rollout_id)
        except grpc.RpcError as error:
            log.warning("checkpoint_commit_not_told", rollout_id=rollout_id, reason=_words(error))

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
        self._client = None

    def _take(self, client: RolloutClient, rollout_id: int, give_up: threading.Event) -> tuple[Received, bytes]:
        received = client.next_batch(rollout_id, rollout_id, give_up=give_up)
        return received, client.save_state(rollout_id)

    def _mending(
        self, action: Callable[[RolloutClient], Answer], *, give_up: threading.Event, connect: bool = True
    ) -> Answer:
        """Do it; when rollout went away or forgot, bring it to where we are and do it again.

        Raises StoppedWaiting when give_up is set while rollout is away.
        """
        client = self._connected(give_up) if connect else self._reconnect(give_up)
        for attempt in range(MAX_MENDS + 1):
            try:
                return action(client)
            except (grpc.RpcError, TornBatch) as error:
                mendable = isinstance(error, TornBatch) or _code(error) in MENDABLE
                if not mendable or attempt == MAX_MENDS:
                    raise RolloutFailed(f"rollout at {client.address}: {_words(error)}") from error
                log.warning("rollout_lost", reason=_words(error), address=client.address, attempt=attempt + 1)
            client = self._mend(client, give_up)
        raise AssertionError("unreachable")

    def _mend(self, lost: RolloutClient, give_up: threading.Event) -> RolloutClient:
        """Connect to rollout as it is now, and bring it to our state and version."""
        self._publisher.forget_group()
        deadline = time.monotonic() + self._config.run.start_timeout_s
        while True:
            client = self._reconnect(give_up)
            try:
                self._bring_up(client)
            except grpc.RpcError as error:
                if time.monotonic() > deadline:
                    raise PeerLost(f"rollout at {client.address} did not come back: {_words(error)}") from error
                log.warning("rollout_not_back_yet", reason=_words(error), address=lost.address)
                time.sleep(0.5)
            else:
                log.info("rollout_back", address=client.address, next_rollout_id=self._next_rollout_id)
                return client

    def _bring_up(self, client: RolloutClient) -> Published:
        warnings = client.restore_state(self._state, next_rollout_id=self._next_rollout_id, attempt=self._attempt)
        for warning in warnings:
            log.warning("rollout_restored_with_warning", warning=warning)
        return self._publish(client, self._next_rollout_id)

    def _connected(self, give_up: threading.Event) -> RolloutClient:
        return self._client if self._client is not None else self._reconnect(give_up)

    def _reconnect(self, give_up: threading.Event) -> RolloutClient:
        """A client of the rollout service that lives now. Raises PeerLost when none is SERVING in time, StoppedWaiting
        when give_up is set before."""
        self.close()
        limit = self._config.run.start_timeout_s
        deadline = time.monotonic() + limit
        while True:
            if give_up.is_set():
                raise StoppedWaiting
            left = max(0.1, deadline - time.monotonic())
            try:
                address = self._config.rollout.rollout_addr or self._find(min(left, 2.0))
                rpc.wait_serving(address, SERVICE, timeout_s=min(left, 2.0))
            except NotReachable as error:  # perhaps it is being started anew, at another address
                if time.monotonic() > deadline:
                    raise PeerLost(f"no rollout service within {limit:g} s: {error}") from error
                continue
            self._client = RolloutClient(address, call_timeout_s=self._config.run.call_timeout_s)
            return self._client

    def _find(self, timeout_s: float) -> str:
        entry = addresses.wait_for(self._run_dir, "rollout", timeout_s=timeout_s)
        if entry.grpc is None:
            raise NotReachable("the rollout service published no gRPC address")
        return entry.grpc


def _code(error: BaseException) -> grpc.StatusCode | None:
    return error.code() if isinstance(error, grpc.Call) else None


def _words(error: BaseException) -> str:
    return f"{error.code().name}: {error.details()}" if isinstance(error, grpc.Call) else str(error)
