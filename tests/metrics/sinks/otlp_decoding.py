"""Reads what was posted to a collector, by the protocol's own classes."""

import gzip
import importlib
from typing import Any  # Any: messages that are made from descriptors

from tests.metrics.sinks.receiver import Request

metrics_service: Any = importlib.import_module("opentelemetry.proto.collector.metrics.v1.metrics_service_pb2")
logs_service: Any = importlib.import_module("opentelemetry.proto.collector.logs.v1.logs_service_pb2")


def decode(request: Request) -> Any:
    kind = (
        logs_service.ExportLogsServiceRequest
        if request.path == "/v1/logs"
        else metrics_service.ExportMetricsServiceRequest
    )
    message = kind()
    message.ParseFromString(gzip.decompress(request.body))
    return message


def plain(attributes: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value") or "string_value") for pair in attributes}


def points_in(requests: list[Request]) -> list[tuple[str, int, float, dict[str, Any]]]:
    """Name, time, value and attributes of every gauge's point."""
    found = []
    for request in requests:
        if request.path == "/v1/metrics":
            for resource in decode(request).resource_metrics:
                run = plain(resource.resource.attributes)["furlong.run"]
                for metric in resource.scope_metrics[0].metrics:
                    found += [
                        (metric.name, p.time_unix_nano, p.as_double, {"run": run, **plain(p.attributes)})
                        for p in metric.gauge.data_points
                    ]
    return found


def logs_in(requests: list[Request]) -> list[tuple[dict[str, Any], Any]]:
    """Resource and record of every log record."""
    return [
        (plain(resource.resource.attributes), record)
        for request in requests
        if request.path == "/v1/logs"
        for resource in decode(request).resource_logs
        for record in resource.scope_logs[0].log_records
    ]
