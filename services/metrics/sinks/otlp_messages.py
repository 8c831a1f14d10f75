"""Rows and records as messages of the OpenTelemetry protocol. The only file that knows its message types. Pure.

A value is a gauge named by its key, with '/' kept and what the protocol's naming rule forbids folded to '_'; the raw
key is an attribute. A point has the row's own time (plus its place in that microsecond, so that no two are equal), its
axis and its attempt. The step is a gauge of its own, named by the axis, with the same time: as an attribute it would
make every point a series of its own.
"""

import datetime
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any  # Any: what JSON holds

import orjson
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest, ExportLogsServiceResponse
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue, KeyValueList
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord
from opentelemetry.proto.metrics.v1.metrics_pb2 import (
    AGGREGATION_TEMPORALITY_DELTA,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    NumberDataPoint,
)
from opentelemetry.proto.resource.v1.resource_pb2 import Resource

from furlong import __version__
from furlong.asking.levels import CRITICAL, DEBUG, ERROR, INFO, NAMES, WARNING, level_number
from services.metrics.sinks.drawn import Drawn
from services.metrics.sinks.names import folder_of

NAMESPACE = "furlong"
MAX_NAME_CHARS = 255
MAX_DEPTH = 6
_fold = folder_of("A-Za-z0-9_./-")
_SEVERITIES = {DEBUG: 5, INFO: 9, WARNING: 13, ERROR: 17, CRITICAL: 21}
_NOT_ATTRIBUTES = frozenset({"ts", "level", "event", "run", "service", "instance"})


def metrics_request(rows: Iterable[Drawn]) -> bytes:
    """One ExportMetricsServiceRequest with all points of the rows."""
    request = ExportMetricsServiceRequest()
    by_run: dict[str, dict[tuple[str, str], Metric]] = {}
    for row in rows:
        metrics = by_run.setdefault(row.run, {})
        common = _attributes({"furlong.axis": row.axis, "furlong.attempt": row.attempt})
        time_ns = row.time_us * 1000 + row.row_id % 1000
        for key, value in {**row.values, row.axis: float(row.step)}.items():
            points = _metric(metrics, "gauge", key).gauge.data_points
            attributes = [*common, _attribute("furlong.key", key)]
            points.append(NumberDataPoint(time_unix_nano=time_ns, as_double=value, attributes=attributes))
        for key, spread in row.histograms.items():
            attributes = [*common, _attribute("furlong.key", key)]
            point = _spread(spread, time_ns, attributes)
            _metric(metrics, "histogram", key).histogram.data_points.append(point)
    for run, metrics in by_run.items():
        resource = request.resource_metrics.add(resource=_resource(run, "metrics", ""))
        scope = resource.scope_metrics.add()
        scope.scope.name, scope.scope.version = NAMESPACE, __version__
        scope.metrics.extend(metrics.values())
    return request.SerializeToString()


def num_points(row: Drawn) -> int:
    """Data points that a row becomes."""
    return len(row.values) + len(row.histograms) + 1


class Said:
    """A log record of a batch, read."""

    def __init__(self, body: Mapping[str, Any], *, run: str, uid: str, received_us: int) -> None:
        self.body, self.run, self.uid, self.received_us = body, run, uid, received_us

    @property
    def source(self) -> tuple[str, str, str]:
        """Run, service and instance."""
        return self.run, str(self.body.get("service") or "unknown"), str(self.body.get("instance") or "")


def read_record(body: bytes, *, run: str, uid: str, received_us: int) -> Said | None:
    """None: a metrics record, which travels as metrics, or nothing that can be read."""
    try:
        record = orjson.loads(body)
    except ValueError:
        return None
    if not isinstance(record, dict) or record.get("event") == "metrics":
        return None
    return Said(record, run=run, uid=uid, received_us=received_us)


def logs_request(records: Sequence[Said]) -> bytes:
    """One ExportLogsServiceRequest."""
    request = ExportLogsServiceRequest()
    by_source: dict[tuple[str, str, str], list[LogRecord]] = {}
    for said in records:
        by_source.setdefault(said.source, []).append(_log_record(said))
    for (run, service, instance), found in by_source.items():
        resource = request.resource_logs.add(resource=_resource(run, service, instance))
        scope = resource.scope_logs.add()
        scope.scope.name, scope.scope.version = NAMESPACE, __version__
        scope.log_records.extend(found)
    return request.SerializeToString()


def rejected(answer: bytes, *, logs: bool) -> tuple[int, str]:
    """How many points or records a success says were not taken, and why."""
    response = ExportLogsServiceResponse() if logs else ExportMetricsServiceResponse()
    try:
        response.ParseFromString(answer)
    except DecodeError:
        return 0, ""  # the status says success; some answer with text
    partial = response.partial_success
    count = getattr(partial, "rejected_log_records" if logs else "rejected_data_points")
    return int(count), partial.error_message


def _log_record(said: Said) -> LogRecord:
    body = said.body
    level = level_number(body.get("level"))
    more = {name: value for name, value in body.items() if name not in _NOT_ATTRIBUTES}
    return LogRecord(
        time_unix_nano=_time_ns(body.get("ts"), said.received_us),
        observed_time_unix_nano=said.received_us * 1000,
        severity_number=_SEVERITIES[level],  # type: ignore[arg-type]  # the enum's numbers
        severity_text=NAMES[level].upper(),
        body=AnyValue(string_value=_text(body.get("event", ""))),
        attributes=[_attribute("log.record.uid", said.uid), *_attributes(more)],
    )


def _time_ns(ts: object, received_us: int) -> int:
    """A record's own time; if it has none that can be read, when it was received."""
    if isinstance(ts, str):
        try:
            moment = datetime.datetime.fromisoformat(ts)
        except ValueError:
            return received_us * 1000
        moment = moment.replace(tzinfo=moment.tzinfo or datetime.UTC)
        since = moment - datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
        us = since // datetime.timedelta(microseconds=1)
        return us * 1000 if 0 <= us < 2**53 else received_us * 1000
    return received_us * 1000


def _metric(metrics: dict[tuple[str, str], Metric], kind: str, key: str) -> Metric:
    metric = metrics.get((kind, key))
    if metric is None:
        name = _fold(key)
        name = (name if name[:1].isalpha() else "_" + name)[:MAX_NAME_CHARS]
        if kind == "gauge":
            metric = Metric(name=name, gauge=Gauge())
        else:
            metric = Metric(name=name, histogram=Histogram(aggregation_temporality=AGGREGATION_TEMPORALITY_DELTA))
        metrics[kind, key] = metric
    return metric


def _spread(spread: Mapping[str, Any], time_ns: int, attributes: list[KeyValue]) -> HistogramDataPoint:
    """n bins between n+1 edges; the protocol has a bucket below and one above besides."""
    edges, counts = [float(edge) for edge in spread["edges"]], [int(count) for count in spread["counts"]]
    return HistogramDataPoint(
        start_time_unix_nano=time_ns - 1,
        time_unix_nano=time_ns,
        count=sum(counts),
        bucket_counts=[0, *counts, 0],
        explicit_bounds=edges,
        attributes=attributes,
    )


def _resource(run: str, service: str, instance: str) -> Resource:
    named = {"service.namespace": NAMESPACE, "service.name": f"furlong-{service}", "furlong.run": run}
    return Resource(attributes=_attributes({**named, **({"service.instance.id": instance} if instance else {})}))


def _attributes(named: Mapping[str, object]) -> list[KeyValue]:
    return [_attribute(name, value) for name, value in named.items() if value is not None]


def _attribute(name: str, value: object) -> KeyValue:
    return KeyValue(key=_text(name), value=_any(value, 0))


def _any(value: object, depth: int) -> AnyValue:
    if isinstance(value, bool):
        return AnyValue(bool_value=value)
    if isinstance(value, int) and -(2**63) <= value < 2**63:
        return AnyValue(int_value=value)
    if isinstance(value, int | float):
        return AnyValue(double_value=float(value) if abs(value) < 1e308 else math.copysign(math.inf, value))
    if isinstance(value, dict) and depth < MAX_DEPTH:
        entries = [KeyValue(key=_text(name), value=_any(item, depth + 1)) for name, item in value.items()]
        return AnyValue(kvlist_value=KeyValueList(values=entries))
    if isinstance(value, list) and depth < MAX_DEPTH:
        return AnyValue(array_value=ArrayValue(values=[_any(item, depth + 1) for item in value]))
    return AnyValue(string_value=_text(value)) if value is not None else AnyValue()


def _text(value: object) -> str:
    """Text that the protocol can hold: no half of a pair of surrogates."""
    text = value if isinstance(value, str) else orjson.dumps(value, default=str).decode()
    return text.encode(errors="replace").decode()
