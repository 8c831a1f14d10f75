"""The bodies of the control surface's requests and answers, as its OpenAPI describes them.

Field names that sgl-router has stand beside Furlong's own, so that its clients read these answers unchanged.
"""

from collections.abc import Iterable
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from services.router.workers.registration import MAX_CHARS, MAX_KEY_CHARS, MAX_LABELS, MAX_PRIORITY
from services.router.workers.worker import State, Worker

LABEL = rf"^[!-+\--<>-~]{{1,{MAX_CHARS}}}$"
"""Visible ASCII without comma and equals sign, which separate labels in a header."""

StateName = Literal["JOINING", "READY", "UNREADY", "DRAINING"]
BreakerName = Literal["closed", "open", "half-open"]
LabelValue = Annotated[str, Field(pattern=LABEL)]
_LABEL_RULES: dict[str, Any] = {"propertyNames": {"pattern": LABEL}, "maxProperties": MAX_LABELS}


def _whole(value: object) -> object:
    """JSON has one kind of number: 7.0 is the whole number 7."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


class RegisterWorker(BaseModel):
    """A worker that asks to be registered. Keys that the router does not know are left alone."""

    model_config = ConfigDict(strict=True, hide_input_in_errors=True)

    url: Annotated[str, Field(json_schema_extra={"format": "worker-url"})]
    """Base address of its HTTP API: http or https, a host or address, a port."""
    worker_type: Literal["regular"] = "regular"
    """Prefill and decode workers have no place here: the router does not pair them."""
    labels: Annotated[dict[str, LabelValue], Field(json_schema_extra=_LABEL_RULES)] = {}
    """For requests that ask for workers with certain labels."""
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY), BeforeValidator(_whole)] = 0
    """Higher first: one of lower priority only takes requests that none of higher priority can take."""
    api_key: Annotated[str, Field(pattern=rf"^[!-~]{{1,{MAX_KEY_CHARS}}}$")] | None = None
    """The key that the worker wants from the router. Never given out again."""


class WorkerUrlBody(BaseModel):
    """Names a worker by its address."""

    model_config = ConfigDict(strict=True, hide_input_in_errors=True)

    url: Annotated[str, Field(json_schema_extra={"format": "worker-url"})]


_ONE_OR_ALL: dict[str, Any] = {
    "anyOf": [
        {"required": ["rid"], "properties": {"rid": {"type": "string", "minLength": 1}}},
        {"required": ["abort_all"], "properties": {"abort_all": {"const": True}}},
    ]
}


class AbortBody(BaseModel):
    """Which request to end. Keys that the router does not know are left alone."""

    model_config = ConfigDict(strict=True, hide_input_in_errors=True, json_schema_extra=_ONE_OR_ALL)

    rid: str | None = None
    """Id of the request, as it was sent with it."""
    abort_all: bool = False
    """Every request on every worker; needs the token."""


class WorkerView(BaseModel):
    """A worker as clients see it."""

    id: str
    url: str
    worker_type: str
    priority: int
    labels: dict[str, str]
    state: StateName
    is_healthy: bool
    """READY: it takes requests."""
    load: int
    """The same as in_flight."""
    in_flight: int
    num_requests: int
    num_failures: int
    policy_version: int | None
    breaker: BreakerName
    """State of its circuit breaker."""
    last_error: str
    connection_mode: Literal["http"] = "http"

    @classmethod
    def of(cls, worker: Worker) -> "WorkerView":
        """What there is to say of a worker now."""
        return cls(
            id=worker.worker_id,
            url=str(worker.url),
            worker_type=worker.worker_type,
            priority=worker.priority,
            labels=dict(worker.labels),
            state=cast(StateName, worker.state.name),
            is_healthy=worker.state is State.READY,
            load=worker.in_flight,
            in_flight=worker.in_flight,
            num_requests=worker.num_requests,
            num_failures=worker.num_failures,
            policy_version=worker.policy_version,
            breaker=cast(BreakerName, worker.breaker_state),
            last_error=worker.last_error,
        )


class RegisteredWorker(WorkerView):
    """A worker just registered: where it is to be found, and as it is now."""

    status: Literal["accepted"] = "accepted"
    worker_id: str
    location: str
    """Path of the worker under the router's address."""
    message: str

    @classmethod
    def of(cls, worker: Worker) -> "RegisteredWorker":
        """The answer to a registration."""
        return cls(
            **WorkerView.of(worker).model_dump(),
            worker_id=worker.worker_id,
            location=f"/workers/{worker.worker_id}",
            message="registered; it takes requests once it has answered a health probe",
        )


class RemovedWorker(BaseModel):
    """A worker that was taken out: requests in flight end in peace, then it is gone."""

    status: Literal["accepted"] = "accepted"
    worker_id: str
    """The name it was removed by."""
    id: str
    url: str
    in_flight: int
    urls: list[str]
    """The addresses of the workers that are left."""
    message: str


class TypeCounts(BaseModel):
    """Workers by type."""

    regular: int
    prefill: int = 0
    decode: int = 0


class WorkerStats(BaseModel):
    """Sums over all workers."""

    total_workers: int
    healthy_workers: int
    total_load: int
    by_type: TypeCounts


class WorkerList(BaseModel):
    """All workers, in the order of registration."""

    workers: list[WorkerView]
    total: int
    stats: WorkerStats

    @classmethod
    def of(cls, workers: Iterable[Worker]) -> "WorkerList":
        """The list as it is now."""
        views = [WorkerView.of(worker) for worker in workers]
        stats = WorkerStats(
            total_workers=len(views),
            healthy_workers=sum(view.is_healthy for view in views),
            total_load=sum(view.in_flight for view in views),
            by_type=TypeCounts(regular=len(views)),
        )
        return cls(workers=views, total=len(views), stats=stats)


class UrlList(BaseModel):
    """The addresses of registered workers."""

    urls: list[str]


class ErrorDetail(BaseModel):
    """What went wrong."""

    model_config = ConfigDict(extra="allow")

    type: str
    """A word that a program can tell errors apart by."""
    message: str


class ErrorBody(BaseModel):
    """Every error of the router itself."""

    model_config = ConfigDict(extra="allow")

    error: ErrorDetail


class Alive(BaseModel):
    """The process answers."""

    status: Literal["alive"] = "alive"


class Ready(BaseModel):
    """A worker takes requests."""

    status: Literal["ready"] = "ready"
    num_ready_workers: int


class Counters(BaseModel):
    """Sums over the workers that are registered now, and the queue."""

    num_workers: int
    num_ready_workers: int
    num_waiting: int
    num_in_flight: int
    num_requests: int
    num_failures: int


class Aborted(BaseModel):
    """What each worker said to an abort: its status, or why there was none."""

    rid: str | None
    workers: dict[str, int | str]


class Flushed(BaseModel):
    """Every worker flushed its cache."""

    message: str
    successful: list[str]
    failed: list[list[str]]
    """Pairs of address and reason."""
    total_workers: int
    http_workers: int


class ModelList(BaseModel):
    """The models that any ready worker has, each once."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    errors: dict[str, str] = {}
    """What went wrong, by worker."""


class Loads(BaseModel):
    """The loads of all workers, one entry a rank of a worker; more keys as engines have them."""

    model_config = ConfigDict(extra="allow")

    timestamp: str
    num_accelerators: int
    loads: list[dict[str, Any]]
    errors: dict[str, str] = {}
    """What went wrong, by worker."""


class WorkerLoad(BaseModel):
    """Requests that run or wait at a worker."""

    worker: str
    worker_type: str
    load: int
    """-1: it did not say."""


class WorkerLoads(BaseModel):
    """As sgl-router's /get_loads."""

    workers: list[WorkerLoad]
    loads: list[WorkerLoad]
    total_workers: int
    successful: int
    failed: int


class OldLoad(BaseModel):
    """Load of one rank of a worker, in the words of engines before /v1/loads."""

    worker: str
    dp_rank: int
    num_reqs: int
    num_waiting_reqs: int
    num_tokens: int
