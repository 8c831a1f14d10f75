"""Where answers about a run come from: its metrics service while that lives, else the store that it has left."""

import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson

from furlong.asking.client import MetricsClient, Refused, Unreachable
from furlong.asking.filters import LogFilter
from furlong.asking.following import Place, place_now
from furlong.asking.forms import line_form, row_form
from furlong.asking.objects import MAX_OBJECTS, RowObject, newest_objects, objects_of
from furlong.asking.store import Curve, NoStore, StoreReader, UnknownName, told_damage
from furlong.rundir import RunDir

STORE_NAME = "metrics.db"
Result = TypeVar("Result")
Tree = dict[str, Any]  # Any: JSON


@dataclass(frozen=True)
class Found:
    """What there is to ask."""

    client: MetricsClient | None
    """The service. None: it is gone."""
    store: StoreReader | None
    """What it has left. None: the service is asked."""
    run: str | None
    """The run that the run directory is of, where the service has more."""


def find(run_dir: RunDir) -> Found:
    """Raises Unreachable, NoStore."""
    from furlong import addresses

    entry = addresses.find(run_dir, "metrics")
    if entry is not None and entry.http:
        return Found(MetricsClient(entry.http), None, None)
    shared, run = _shared_service(run_dir)
    if shared:
        return Found(MetricsClient(http_of(shared)), None, run)
    return Found(None, StoreReader(run_dir.metrics_store / STORE_NAME), None)


class Source:
    """Answers as JSON trees, wherever they come from. Raises Unreachable, Refused, NoStore."""

    def __init__(self, found: Found) -> None:
        self._found = found

    @property
    def is_dead(self) -> bool:
        """Whether only the store is left."""
        return self._found.client is None

    def rows(self, *, run: str | None, last: int) -> list[Tree]:
        """The newest rows, oldest first."""
        if (client := self._found.client) is not None:
            return list(client.get("/api/rows", {"run": run, "last": last})["rows"])
        rows = self._of_store(lambda store: store.rows(run=run, last=last))
        return [orjson.loads(row_form(*row)) for row in rows]

    def logs(self, wanted: LogFilter, *, last: int, before: int | None = None) -> list[Tree]:
        """The newest log lines, oldest first, with id and time."""
        if (client := self._found.client) is not None:
            params = {**live_params(wanted), "last": last, "before": before}
            return list(client.get("/api/logs", params)["logs"])
        page = self._of_store(lambda store: store.logs(wanted, last=last, before=before))
        return [orjson.loads(line_form(line.record_id, line.received_us, line.body)) for line in page.lines]

    def alerts(self, *, run: str | None, firing: bool | None, last: int) -> list[Tree]:
        """Changes of alerts, oldest first."""
        if (client := self._found.client) is not None:
            return list(client.get("/api/alerts", {"run": run, "firing": firing, "last": last})["alerts"])
        return self._of_store(lambda store: store.alerts(run=run, firing=firing, last=last))

    def keys(self, *, run: str | None) -> list[str]:
        """The keys that have numbers."""
        if (client := self._found.client) is not None:
            series = client.get("/api/series", {"run": run})["series"]
        else:
            series = self._of_store(lambda store: store.series(run))
        return sorted({str(item["key"]) for item in series})

    def curves(self, keys: Sequence[str], *, run: str | None, last: int | None, attempt: int | None) -> list[Curve]:
        """Keys over steps, with NaN as None."""
        if (client := self._found.client) is not None:
            params = {"key": list(keys), "run": run, "last": last, "attempt": attempt}
            return [_curve(tree) for tree in client.get("/api/points", params)["curves"]]
        return self._of_store(lambda store: store.curves(keys, run=run, last=last, attempt=attempt))

    def object_keys(self, *, run: str | None) -> list[str]:
        """The keys that are histograms or tables in the last rows."""
        if (client := self._found.client) is not None:
            found = [RowObject(**tree) for tree in client.get("/api/objects", {"run": run})["objects"]]
        else:
            found = self._of_store(lambda store: newest_objects(store, run=run))
        return sorted({item.key for item in found})

    def objects(
        self, keys: Sequence[str], *, run: str | None, last: int | None, attempt: int | None
    ) -> list[RowObject]:
        """Histograms and tables over steps."""
        last = min(last or MAX_OBJECTS, MAX_OBJECTS)
        if (client := self._found.client) is not None:
            params = {"key": list(keys), "run": run, "last": last, "attempt": attempt}
            return [RowObject(**tree) for tree in client.get("/api/objects", params)["objects"]]
        return self._of_store(lambda store: objects_of(store, keys, run=run, last=last, attempt=attempt))

    def place(self) -> Place:
        """The end of the store."""
        if (client := self._found.client) is not None:
            return Place.parse(client.get("/api/place")["place"])
        return self._of_store(place_now)

    def _of_store(self, question: Callable[[StoreReader], Result]) -> Result:
        store = self._found.store
        if store is None:
            raise NoStore("there is no store")
        try:
            with told_damage(store.path):
                return question(store)
        except UnknownName as error:
            like = f"Did you mean {', '.join(error.close)}?" if error.close else "There is none that looks like it."
            raise Refused(str(error), like, close=error.close) from None


def live_params(wanted: LogFilter) -> dict[str, str | int | None]:
    return {
        "run": wanted.run,
        "service": wanted.service,
        "instance": wanted.instance,
        "level": wanted.level,
        "rollout_id": wanted.rollout_id,
        "text": wanted.text,
    }


def _curve(tree: Tree) -> Curve:
    values = [None if value == "NaN" else float(value) for value in tree["values"]]
    return Curve(tree["run"], tree["axis"], tree["key"], tree["steps"], tree["attempts"], values)


def _shared_service(run_dir: RunDir) -> tuple[str, str | None]:
    """The gRPC address of a service that several runs share, and this run's name; nothing for a run with its own."""
    try:
        tree = tomllib.loads(run_dir.config.read_text())
        address, name = tree.get("metrics", {}).get("metrics_addr", ""), tree.get("run", {}).get("name")
    except (OSError, ValueError, AttributeError):
        return "", None
    return str(address), str(name) if name else None


def http_of(grpc_address: str) -> str:
    """Where a service that is named by its gRPC address answers over HTTP."""
    import grpc

    from furlong.rpc import channel
    from furlong.v1 import metrics_pb2, metrics_pb2_grpc

    with channel(grpc_address) as to_metrics:
        try:
            stub = metrics_pb2_grpc.MetricsStub(to_metrics)
            answer = stub.GetStatus(metrics_pb2.GetMetricsStatusRequest(), timeout=5.0)
        except grpc.RpcError as error:
            code = error.code().name if isinstance(error, grpc.Call) else "error"
            raise Unreachable(f"the metrics service at {grpc_address} does not answer ({code})") from None
    if not answer.http:
        raise Unreachable(f"the metrics service at {grpc_address} does not say where it answers over HTTP; use --url")
    return answer.http
