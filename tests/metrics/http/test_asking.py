"""Questions over HTTP: the right answers, and a clear refusal of everything else."""

import json
import math
from typing import Any

import pytest

from furlong.records import Last
from tests.metrics.asking import get, post, refusal, request
from tests.metrics.running import MetricsProcess, batch, part, send


def metrics(run: str, step: int, values: dict[str, object], **more: object) -> bytes:
    record = {"event": "metrics", "run": run, "axis": "train/step", "step": step, "values": values, **more}
    return json.dumps(record).encode()


def fill(service: MetricsProcess, *bodies: bytes) -> None:
    assert post(service.http, b"\n".join(bodies))["num_refused"] == 0


def test_runs_are_listed_newest_first_with_their_axes(service: MetricsProcess) -> None:
    fill(service, metrics("first", 4, {"a": 1}))
    fill(service, metrics("second", 2, {"a": 1}), metrics("second", 1, {"b": 1}, axis="rollout/step"))
    runs = [run for run in get(service.http, "/api/runs")["runs"] if run["run"] in ("first", "second")]
    assert [(run["run"], run["axes"]) for run in runs] == [
        ("second", {"rollout/step": 1, "train/step": 2}),
        ("first", {"train/step": 4}),
    ]


def test_rows_are_of_the_run_the_axis_and_the_newest_attempt(service: MetricsProcess) -> None:
    old = [metrics("rows", step, {"x": step}) for step in range(6)]
    new = [metrics("rows", step, {"x": step * 10}, attempt=2) for step in (3, 4)]
    fill(service, *old, *new, metrics("rows", 3, {"y": 1}, axis="eval/step"))
    rows = get(service.http, "/api/rows?run=rows&axis=train/step")["rows"]
    assert [(row["step"], row["values"]["x"]) for row in rows] == [(0, 0), (1, 1), (2, 2), (3, 30), (4, 40)]
    assert [row["step"] for row in get(service.http, "/api/rows?run=rows&axis=train/step&last=2")["rows"]] == [3, 4]
    first = get(service.http, "/api/rows?run=rows&axis=train/step&attempt=1")["rows"]
    assert [row["values"]["x"] for row in first] == [0, 1, 2, 3, 4, 5]
    after = get(service.http, f"/api/rows?run=rows&after={rows[0]['id']}&last=2")["rows"]
    assert [row["id"] for row in after] == sorted(row["id"] for row in after) and len(after) == 2


def test_points_follow_the_newest_attempt(service: MetricsProcess) -> None:
    fill(service, *(metrics("points", step, {"x": step}) for step in range(6)))
    fill(service, *(metrics("points", step, {"x": step * 10}, attempt=2) for step in (3, 4)))
    (curve,) = get(service.http, "/api/points?key=x&run=points")["curves"]
    assert (curve["steps"], curve["values"], curve["attempts"]) == ([0, 1, 2, 3, 4], [0, 1, 2, 30, 40], [1, 1, 1, 2, 2])
    (first,) = get(service.http, "/api/points?key=x&run=points&attempt=1&last=2")["curves"]
    assert (first["steps"], first["values"]) == ([4, 5], [4, 5])


def test_several_keys_and_runs_come_as_several_curves(service: MetricsProcess) -> None:
    fill(service, metrics("p1", 0, {"both": 1, "other": 2}), metrics("p2", 0, {"both": 3}))
    curves = get(service.http, "/api/points?key=both&key=other")["curves"]
    assert {(curve["run"], curve["key"]) for curve in curves} == {("p1", "both"), ("p2", "both"), ("p1", "other")}


def test_numbers_that_are_not_finite_keep_their_names(service: MetricsProcess) -> None:
    values = {f"n/{name}": name for name in ("NaN", "Infinity", "-Infinity")}
    fill(service, metrics("odd", 0, dict(values)))
    for key, name in values.items():
        (curve,) = get(service.http, f"/api/points?key={key}&run=odd")["curves"]
        assert curve["values"] == [name]


def test_thinned_curve_keeps_its_peaks(service: MetricsProcess) -> None:
    spikes = {1234: 99.0, 2345: -99.0}
    fill(service, *(metrics("thin", n, {"x": spikes.get(n, math.sin(n / 50))}) for n in range(3000)))
    (curve,) = get(service.http, "/api/points?key=x&run=thin&max_points=100")["curves"]
    assert len(curve["steps"]) <= 100 and {1234, 2345, 0, 2999} <= set(curve["steps"])
    assert curve["values"][curve["steps"].index(1234)] == 99.0


def test_unknown_key_and_run_name_the_closest(service: MetricsProcess) -> None:
    fill(service, metrics("arith-7", 0, {"train/loss": 1}))
    status, said = refusal(service.http, "/api/points?key=train/los")
    assert status == 404 and "train/loss" in said["remedy"]
    for path in ("rows?", "logs?", "series?", "alerts?", "points?key=train/loss&"):
        status, said = refusal(service.http, f"/api/{path}run=arith")
        assert status == 404 and "arith-7" in said["close"]


def log(run: str, number: int, **fields: object) -> bytes:
    return json.dumps({"event": "e", "run": run, "number": number, **fields}).encode()


def numbers(service: MetricsProcess, query: str) -> list[Any]:
    return [line["record"]["number"] for line in get(service.http, f"/api/logs?{query}")["logs"]]


def test_logs_are_filtered(service: MetricsProcess) -> None:
    fill(
        service,
        log("l", 0, service="trainer", instance="trainer-0", rollout_id=3),
        log("l", 1, service="rollout", level="WARN", text='Straße "quoted"'),
        log("l", 2, service="trainer", instance="trainer-1", level="error", rollout_id=30),
        log("l", 3, level="debug"),
        log("l", 4, level=50, nested={"deep": "NEEDLE"}),
        metrics("l", 0, {"needle": 1}),
    )
    assert numbers(service, "run=l") == [0, 1, 2, 4]
    assert numbers(service, "run=l&level=debug") == [0, 1, 2, 3, 4]
    assert numbers(service, "run=l&level=warning") == [1, 2, 4]
    assert numbers(service, "run=l&service=trainer") == [0, 2]
    assert numbers(service, "run=l&instance=trainer-1") == [2]
    assert numbers(service, "run=l&rollout_id=3") == [0]
    assert numbers(service, "run=l&text=needle") == [4]
    assert numbers(service, "run=l&text=STRA%C3%9FE") == [1]
    assert numbers(service, "run=l&text=%22quoted%22") == [1]


def test_logs_are_paged_both_ways(service: MetricsProcess) -> None:
    for begin in range(0, 300, 100):
        fill(service, *(log("paged", begin + n) for n in range(100)))
    page = get(service.http, "/api/logs?run=paged&last=120")
    assert [line["record"]["number"] for line in page["logs"]] == list(range(180, 300)) and page["complete"]
    assert numbers(service, f"run=paged&last=150&before={page['before']}") == list(range(30, 180))
    first = page["logs"][0]["id"]
    assert numbers(service, f"run=paged&after={first}&last=60") == list(range(181, 241))
    assert numbers(service, f"run=paged&before={first}&last=1") == [179]


def test_other_producers_records_are_found_too(service: MetricsProcess, producer: str) -> None:
    send(service, batch([part(77, {"train/grpc": ["last", 0.5]})], producer=producer))
    telemetry = service.telemetry("asked-0")
    telemetry.metrics("train/step", 78, {"train/grpc": Last(0.25)}, part="trainer", parts=["trainer"])
    telemetry.record({"event": "told", "number": 5})
    assert telemetry.close(10)
    (curve,) = get(service.http, "/api/points?key=train/grpc&run=r")["curves"]
    assert (curve["steps"], curve["values"]) == ([77, 78], [0.5, 0.25])
    assert numbers(service, "run=r&instance=asked-0&text=told") == [5]


@pytest.mark.parametrize(
    "path",
    ["/api/rows?last=0", "/api/rows?last=x", "/api/rows?after=-1", "/api/points", "/api/points?key=x&max_points=1",
     "/api/logs?level=loud", "/api/logs?rollout_id=x", "/api/rows?rum=x", "/api/live?levle=info", "/api/live?place=1.2",
     "/api/live?kinds=x", "/api/alerts?firing=x", "/api/logs?last=99999999",
     "/api/points?" + "&".join(["key=x"] * 101)],
)  # fmt: skip
def test_senseless_questions_are_refused_with_a_remedy(service: MetricsProcess, path: str) -> None:
    assert refusal(service.http, path)[0] == 400


def test_unknown_address_is_told(service: MetricsProcess) -> None:
    status, said = refusal(service.http, "/api/nothing")
    assert status == 404 and "/docs" in said["remedy"]


def test_every_answer_is_documented_with_an_example(service: MetricsProcess) -> None:
    api = get(service.http, "/openapi.json")
    for path in ("runs", "rows", "series", "points", "logs", "alerts", "live"):
        operation = api["paths"][f"/api/{path}"]["get"]
        (content,) = operation["responses"]["200"]["content"].values()
        assert operation["summary"] and operation["description"] and content["example"], path
    assert len(api["paths"]["/v1/records"]["post"]["requestBody"]["content"]) == 2


def test_example_of_taking_in_is_taken(service: MetricsProcess) -> None:
    body = get(service.http, "/openapi.json")["paths"]["/v1/records"]["post"]["requestBody"]["content"]
    assert post(service.http, body["application/x-ndjson"]["example"].encode())["taken"] == 2
    assert post(service.http, json.dumps(body["application/json"]["example"]).encode())["taken"] == 2


def test_page_of_documentation_needs_nothing_from_elsewhere(service: MetricsProcess) -> None:
    status, headers, page = request(service.http, "GET", "/docs")
    assert status == 200 and headers["content-type"].startswith("text/html")
    assert b"http://" not in page and b"https://" not in page and b"//cdn" not in page
