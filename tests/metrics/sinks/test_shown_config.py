"""What of a run's configuration others may see."""

from pathlib import Path
from typing import Any, cast

from furlong.jsonline import Secrets
from furlong.rundir import RunDir
from services.metrics.rows import RowReader
from services.metrics.sinks.shown_config import shown_config
from services.metrics.sinks.sink import SinkContext


def context(config: dict[str, Any] | None) -> SinkContext:
    reader, nowhere = cast("RowReader", None), Path("nowhere")
    secrets = Secrets(["hunter2hunter2"])
    return SinkContext("s", RunDir(nowhere), nowhere, nowhere, 5.0, reader, secrets=secrets, run_config=config)


def test_of_urls_only_scheme_host_and_port_are_shown_wherever_they_stand() -> None:
    given = {
        "a": {"url": "https://u:p@h:1/HUSH?x", "named": "engine-0=http://h/HUSH", "odd": "http://h:x/HUSH", "n": 1},
        "many": ["http://s/HUSH", ["grpc://t:2/HUSH"]],
        "text": "hunter2hunter2 it is",
        "none": None,
    }
    unreadable = "[a URL that cannot be read]"
    assert shown_config(context(given)) == {
        "a": {"url": "https://h:1", "named": unreadable, "odd": unreadable, "n": 1},
        "many": ["http://s", ["grpc://t:2"]],
        "text": "[redacted] it is",
        "none": None,
    }
    assert shown_config(context(None)) == {}
