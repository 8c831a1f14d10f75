"""What a posted body is cut into, however it comes in pieces."""

import json

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.metrics.http import splitting
from services.metrics.http.splitting import MAX_RECORD_BYTES, Record, Splitter


def cut(body: bytes, size: int | None = None) -> list[object]:
    """Records as objects, refusals as their reasons."""
    splitter = Splitter()
    pieces = [body[at : at + size] for at in range(0, len(body), size)] if size else [body]
    items = [item for piece in pieces for item in splitter.feed(piece)] + splitter.finish()
    return [orjson.loads(item.body) if isinstance(item, Record) else item.reason for item in items]


@pytest.mark.parametrize("size", [None, 1, 2, 3, 7])
@pytest.mark.parametrize(
    ("body", "records"),
    [
        (b"", []),
        (b"\n \r\n\t\n", []),
        (b'{"a":1}', [{"a": 1}]),
        (b'{"a":1}\r\n\r\n{"b":2}\n', [{"a": 1}, {"b": 2}]),
        (b'\xef\xbb\xbf{"a":1}\n', [{"a": 1}]),
        (b'\xef\xbb\xbf[{"a":1}]', [{"a": 1}]),
        (b' \n[{"a":1}, {"b":"]"}\n,{"c":[1,{}]}] ', [{"a": 1}, {"b": "]"}, {"c": [1, {}]}]),
        (b"[]", []),
        (b'[{"a":1}][{"b":1}]\n{"c":3}', [{"a": 1}, {"b": 1}, {"c": 3}]),
        (b'{"a":1}{"b":2} {"c":3}\n{"d":4}', [{"a": 1}, {"b": 2}, {"c": 3}, {"d": 4}]),
        (b'[{"a":1},{"b":2}]\n[{"c":3}]\n', [{"a": 1}, {"b": 2}, {"c": 3}]),
        (b'{\n  "a": 1,\n  "b": {"c": 2}\n}\n{\n  "d": 3\n}\n', [{"a": 1, "b": {"c": 2}}, {"d": 3}]),
        (b'{"x":"\xff\xfe"}', [{"x": "��"}]),
        ('{"x":"€"}'.encode(), [{"x": "€"}]),
        (b'{"x":NaN,"y":Infinity}', [{"x": "NaN", "y": "Infinity"}]),
        (b'{"x":"\\ud800"}', [{"x": "?"}]),
        (b'{"x":"\\u20ac"}', [{"x": "€"}]),
        (b"{}", [{}]),
    ],
)
def test_records_are_found(body: bytes, records: list[object], size: int | None) -> None:
    assert cut(body, size) == records


@pytest.mark.parametrize(
    ("body", "kept", "num_refused"),
    [
        (b'{"a":1, "b\n{"c":1}\n', [{"c": 1}], 1),
        (b'{"a":1, "b{"c":1}\n{"d":1}', [{"c": 1}, {"d": 1}], 1),
        (b'hello\n5\n"x"\nnull\n{"a":1}', [{"a": 1}], 4),
        (b'[1,{"a":1},"x"]', [{"a": 1}], 2),
        (b'[{"a":1},{"b":', [{"a": 1}], 1),
        (b'[{"a":1}', [{"a": 1}], 1),
        (b"[" * 5000, [], 1),
        (b'{"a":' * 5000, [], 1),
        (b'{"a":1}\n{"a"', [{"a": 1}], 1),
    ],
)
def test_what_is_no_record_costs_only_itself(body: bytes, kept: list[object], num_refused: int) -> None:
    items = cut(body)
    assert [item for item in items if isinstance(item, dict)] == kept
    assert len([item for item in items if isinstance(item, str)]) == num_refused


def test_line_that_is_too_long_is_refused_and_the_next_one_taken() -> None:
    body = b'{"a":"' + b"x" * (3 * MAX_RECORD_BYTES) + b'"}\n{"b":1}\n'
    reason, record = cut(body, 1 << 16)
    assert record == {"b": 1} and "bytes" in str(reason)


def test_endless_line_of_welded_objects_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splitting, "MAX_RECORD_BYTES", 1000)
    assert cut(b'{"a":"xyz"}' * 5000, 700) == [{"a": "xyz"}] * 5000


def test_value_that_never_ends_does_not_grow_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splitting, "MAX_RECORD_BYTES", 1000)
    splitter = Splitter()
    refusals = [item for _ in range(100) for item in splitter.feed(b'[{"a":"' + b"x" * 500)]
    assert refusals


NUMBERS = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)  # fmt: skip
RECORDS = st.lists(st.dictionaries(st.text(max_size=8), JSON, max_size=4), max_size=8)
LINE, WELDED, ARRAY = "\n", "", ","


@given(records=RECORDS, form=st.sampled_from([LINE, WELDED, ARRAY]), size=st.integers(1, 64), ascii=st.booleans())
@settings(max_examples=150, deadline=None)
def test_whole_records_come_out_as_they_went_in(records: list[object], form: str, size: int, ascii: bool) -> None:
    text = form.join(json.dumps(record, ensure_ascii=ascii) for record in records)
    body = (f"[{text}]" if form == ARRAY else text).encode("utf-8", "replace")
    once = cut(body)
    assert cut(body, size) == once
    if not ascii and "?" not in text:  # lone surrogates become question marks
        assert once == records


@given(body=st.binary(max_size=400), size=st.integers(1, 50))
@settings(max_examples=200, deadline=None)
def test_any_bytes_are_cut_without_an_error(body: bytes, size: int) -> None:
    assert all(isinstance(item, dict | str) for item in cut(body, size))
