"""Whatever stands in a metrics record, the service goes on and the next record is taken."""

import itertools
import random

import orjson

from tests.metrics.running import MetricsProcess, batch, part, send

JUNK = [
    None,
    True,
    0,
    -1,
    2**63,
    2**64 - 1,
    1e308,
    -1e308,
    1e-320,
    "",
    "NaN",
    "x",
    [],
    {},
    [[]],
    ["last"],
    ["mean", 1, 0],
]
JUNK += [
    ["mean", 1, "NaN"],
    ["mean", "Infinity", "Infinity"],
    ["sum", 2**63 - 1],
    ["last", 1e400],
    [{}, 1],
    ["max", None],
]


def test_no_record_stops_the_service(service: MetricsProcess, producer: str, step: int) -> None:
    keys = ["run", "axis", "step", "attempt", "rollout_id", "part", "parts", "values"]
    good = orjson.loads(part(step + 1, {"train/x": ["sum", 1]}))
    bodies = [{**good, key: junk} for key, junk in itertools.product(keys, JUNK)]
    bodies += [{**good, "step": step + 2, "values": {"train/x": junk}} for junk in JUNK]
    bodies += [
        {**good, "step": step + 3, "values": {"train/x": ["sum", value]}} for value in (2**63, 2**63, 1e308, 1e308)
    ]
    random.Random(1).shuffle(bodies)
    lines = [orjson.dumps(body) for body in bodies]
    send(service, batch(lines, producer=producer))
    (ack,) = send(service, batch([part(step, {"train/x": ["last", 1]})], producer=producer, first=len(lines) + 1))
    assert ack.through_sequence == len(lines) + 1
    assert service.wait_row(step)["values"] == {"train/x": 1}
    assert service.rows_of(step + 3)
