"""JSON of other programs is read whole: nothing of it is cut off, and none of it stops the writer."""

from pathlib import Path

import orjson
import pytest

from furlong.jsonline import Secrets
from services.metrics.http.splitting import Record, Splitter
from services.metrics.intake import RecordsIn
from services.metrics.mildjson import read_object
from services.metrics.tailing.pieces import JsonObject, pieces
from tests.metrics.running import part
from tests.metrics.stores import line, store

LARGE = {"values": {f"train/{n}": n for n in range(1500)}, "text": "y" * 20_000, "deep": [[[[[[[[[[[[1]]]]]]]]]]]]}


@pytest.mark.parametrize(
    ("content", "fields"),
    [
        (b'{"a": "x\\ud800y"}', {"a": "x?y"}),
        (b'{"\\udfff": 1}', {"?": 1}),
        (b'{"a": "\xff"}', {"a": "\ufffd"}),
        (b'{"a": [1e400, -1e400, NaN]}', {"a": ["Infinity", "-Infinity", "NaN"]}),
        (b'{"a": %d, "b": NaN}' % 2**70, {"a": float(2**70), "b": "NaN"}),
        (b'{"a": %d, "b": NaN}' % (2**64 - 1), {"a": 2**64 - 1, "b": "NaN"}),
        (b'{"a": -0.0, "b": NaN}', {"a": -0.0, "b": "NaN"}),
    ],
)
def test_what_orjson_refuses_is_kept(content: bytes, fields: dict[str, object], tmp_path: Path) -> None:
    assert read_object(content)[0] == fields
    with store(tmp_path / "m.db") as new:
        assert new.take(content).num_refused == 0
        assert orjson.loads(new.bodies()[0]) == fields


@pytest.mark.parametrize("form", ["array", "welded", "surrogate"])
def test_nothing_of_a_large_record_is_cut_off(form: str) -> None:
    whole = orjson.dumps(LARGE)
    body = {"array": b"[" + whole + b"]", "welded": whole + whole, "surrogate": whole[:-1] + b',"s":"\\ud800"}'}[form]
    splitter = Splitter()
    items = [*splitter.feed(body), *splitter.finish()]
    assert items and all(isinstance(item, Record) for item in items)
    found = [orjson.loads(item.body) for item in items if isinstance(item, Record)]
    assert all(LARGE.items() <= record.items() for record in found)
    followed = pieces(body, body.decode()) if form != "array" else []
    assert all(isinstance(piece, JsonObject) and LARGE.items() <= piece.fields.items() for piece in followed)


@pytest.mark.parametrize("depth", [300, 1000, 1100, 100_000])
@pytest.mark.parametrize("more", [b',\n"b": 1}', b', "b": "\\ud800"}', b', "b": "SECRET123"}'])
def test_deep_nesting_stops_nothing(depth: int, more: bytes, tmp_path: Path) -> None:
    deep = b'{"a": ' + b"[" * depth + b"]" * depth + more
    splitter = Splitter()
    assert len([*splitter.feed(deep.replace(b"\n", b" ") + b"\n"), *splitter.finish()]) == 1
    with store(tmp_path / "m.db") as new:
        new.writer.intake._secrets = Secrets(["SECRET123"])
        new.writer.submit(RecordsIn("r/p", 1, 1, (deep, line(1), part(1, {"x": 1})))).result(10)
        assert len(new.rows()) == 1
        assert not any(b"SECRET123" in body for body in new.bodies())
