"""Rows and log lines as they are answered: the JSON that is stored, with id and time beside it. Pure."""

from furlong.clock import iso


def row_form(row_id: int, emitted_us: int, body: bytes) -> bytes:
    """A row with its id and when it was handed on."""
    return b'{"id":%d,"emitted":"%s",' % (row_id, iso(emitted_us).encode()) + body[1:]


def line_form(record_id: int, received_us: int, body: bytes) -> bytes:
    """A log line as it came, with its id and when it came beside it."""
    return b'{"id":%d,"received":"%s","record":' % (record_id, iso(received_us).encode()) + body + b"}"
