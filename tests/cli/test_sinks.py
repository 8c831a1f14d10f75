"""`furlong sinks` and the lines of sinks in `furlong status`."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from furlong.cli.main import main
from furlong.cli.sink_lines import sink_line
from tests.metrics.running import MetricsProcess, batch, part, send, until

STATE = {"name": "wandb", "state": "healthy", "num_rows_behind": 0, "seconds_behind": 0.0, "last_error": ""}
STATE["num_rows_refused"] = STATE["num_values_left_out"] = 0


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MetricsProcess]:
    made = MetricsProcess(tmp_path_factory.mktemp("sinks"), environment={"SECRET_TOKEN": "s3cr3t-t0ken"}).start()
    send(made, batch([part(n, {"train/loss": ["last", n]}) for n in range(1, 11)]))
    made.wait_rows(10)
    yield made
    made.end()


@pytest.fixture
def furlong(service: MetricsProcess, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def run(*words: str) -> tuple[int, str, str]:
        code = main([*words, "--run-dir", str(service.run_dir.root)])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({}, "sink wandb: healthy"),
        ({"state": "lagging", "num_rows_behind": 120, "seconds_behind": 34.2}, "sink wandb: lagging by 120 rows, 34 s"),
        (
            {"state": "failing", "num_rows_behind": 1, "seconds_behind": 2.6, "last_error": "OSError: no\nroute"},
            "sink wandb: failing because OSError: no route: 1 row, 3 s behind",
        ),
        ({"state": "failing", "last_error": "x" * 999}, f"sink wandb: failing because {'x' * 200}..."),
        ({"num_rows_refused": 2}, "sink wandb: healthy; 2 rows refused and left out"),
        ({"num_values_left_out": 1}, "sink wandb: healthy; 1 value left out"),
        ({"state": "closed"}, "sink wandb: closed"),
    ],
)
def test_line_says_how_far_and_why(given: dict[str, Any], line: str) -> None:
    assert sink_line({**STATE, **given}) == line


def test_status_shows_each_sink(service: MetricsProcess, furlong: Callable[..., tuple[int, str, str]]) -> None:
    service.run_dir.config.unlink(missing_ok=True)  # as of a service alone: there is no whole run here
    _, shown, _ = furlong("status")
    assert "sink jsonl: healthy\n" in shown
    _, shown, _ = furlong("status", "--json")
    (metrics,) = [item for item in json.loads(shown)["instances"] if item["instance"] == "metrics"]
    assert metrics["details"]["sinks"][0]["name"] == "jsonl"


def test_sink_is_added_late_gets_every_row_and_survives_a_restart(
    service: MetricsProcess, furlong: Callable[..., tuple[int, str, str]]
) -> None:
    assert furlong("sinks", "add", "jsonl", "--name", "copy", "--option", "path=copy.jsonl") == (0, "added copy\n", "")
    copy = service.run_dir.root / "copy.jsonl"
    until(lambda: copy.exists() and copy.read_bytes() == service.run_dir.metrics_rows.read_bytes(), "a full copy")
    service.stop()
    service.start()
    send(service, batch([part(11, {"train/loss": ["last", 1]})], first=11))
    until(lambda: len(service.rows()) == 11, "the new row")
    until(lambda: copy.read_bytes() == service.run_dir.metrics_rows.read_bytes(), "the new row in the copy, once")
    assert "copy (jsonl, added while running): path=copy.jsonl\n  sink copy: healthy" in furlong("sinks")[1]
    assert furlong("sinks", "remove", "copy") == (0, "removed copy\n", "")
    assert [sink["name"] for sink in json.loads(furlong("sinks", "list", "--json")[1])] == ["jsonl"]
    service.stop()
    service.start()
    assert "copy" not in furlong("sinks")[1]


def test_kept_cursor_goes_on_where_it_was(
    service: MetricsProcess, furlong: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    kept = service.run_dir.root / "kept.jsonl"
    furlong("sinks", "add", "jsonl", "--name", "kept", "--option", "path=kept.jsonl")
    until(lambda: kept.exists() and kept.read_bytes() == service.run_dir.metrics_rows.read_bytes(), "a full copy")
    furlong("sinks", "remove", "kept", "--keep-cursor")
    furlong("sinks", "add", "jsonl", "--name", "kept", "--option", "path=kept.jsonl")
    assert kept.read_bytes() == service.run_dir.metrics_rows.read_bytes()
    assert furlong("sinks", "remove", "kept")[0] == 0


def test_one_of_a_flag_is_removed_and_restored_where_it_was(
    service: MetricsProcess, furlong: Callable[..., tuple[int, str, str]]
) -> None:
    before = len(service.rows())
    assert furlong("sinks", "remove", "jsonl") == (0, "removed jsonl\n", "")
    send(service, batch([part(90, {"train/loss": ["last", 90]})], producer="r/y-0"))
    assert len(service.rows()) == before
    assert furlong("sinks", "restore", "jsonl") == (0, "restored jsonl\n", "")
    assert [row["step"] for row in service.wait_rows(before + 1)[before:]] == [90]
    assert furlong("sinks", "restore", "jsonl")[0] == 2


def test_name_of_a_removed_one_is_not_given_away(
    service: MetricsProcess, furlong: Callable[..., tuple[int, str, str]]
) -> None:
    furlong("sinks", "remove", "jsonl")
    code, _, said = furlong("sinks", "add", "jsonl", "--name", "jsonl", "--option", "path=other.jsonl")
    assert code == 2 and "Restore it, or give another name" in said
    assert furlong("sinks", "restore", "jsonl")[0] == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("add", "python", "--name", "x", "--option", "class=os.system"), "it runs code of your choice"),
        (("add", "nonsense", "--name", "x"), "must be one of jsonl, mlflow"),
        (("add", "jsonl", "--name", "jsonl"), "is taken by another sink"),
        (("add", "jsonl", "--name", "../x"), "must be letters, digits"),
        (("add", "jsonl", "--name", "x", "--option", "path=/etc/rows"), "must lie in"),
        (("add", "jsonl", "--name", "x", "--option", "path=../rows"), "must lie in"),
        (("add", "jsonl", "--name", "x", "--option", "path=7"), "must be a text, got int"),
        (("remove", "nothing"), "there is no sink 'nothing'"),
        (("restore", "nothing"), "no sink 'nothing' of a flag was removed"),
        (("add", "jsonl"), "needs one KIND and --name NAME"),
        (("add", "jsonl", "--name", "x", "--option", "path"), "must be KEY=VALUE"),
        (("swap",), "is not what this command takes"),
    ],
)
def test_what_cannot_be_is_refused_with_a_reason(
    furlong: Callable[..., tuple[int, str, str]], words: tuple[str, ...], said: str
) -> None:
    code, _, error = furlong("sinks", *words)
    assert code == 2 and said in error
    assert ".." not in error.replace("../", "") and "Remove it first, or give another name. Remove" not in error
    assert [sink["name"] for sink in json.loads(furlong("sinks", "--json")[1])] == ["jsonl"]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("jsonl", {}),
        ("jsonl", {"path": "metrics.jsonl"}),
        ("jsonl", {"path": "metrics/metrics.db"}),
        ("jsonl", {"path": "addresses.json"}),
        ("jsonl", {"path": "logs/metrics.jsonl"}),
        ("tensorboard", {"dir": "metrics"}),
        ("wandb", {"dir": "spool", "mode": "offline"}),
        ("mlflow", {"uri": "file:///etc/mlflow"}),
        ("mlflow", {"uri": "sqlite:///metrics/metrics.db"}),
    ],
)
def test_what_the_run_keeps_is_no_place_for_an_added_sink(
    service: MetricsProcess, furlong: Callable[..., tuple[int, str, str]], kind: str, options: dict[str, str]
) -> None:
    before = len(service.rows())
    words = [word for name, value in options.items() for word in ("--option", f"{name}={value}")]
    code, _, error = furlong("sinks", "add", kind, "--name", "odd", *words)
    assert code != 0
    assert "sinks.odd." in error
    assert len(service.rows()) == before


def test_two_sinks_never_write_one_file(service: MetricsProcess, furlong: Callable[..., tuple[int, str, str]]) -> None:
    assert furlong("sinks", "add", "jsonl", "--name", "one", "--option", "path=same.jsonl")[0] == 0
    assert furlong("sinks", "add", "jsonl", "--name", "two", "--option", "path=same.jsonl")[0] == 0
    until(lambda: any("another writes" in sink.last_error for sink in service.status().sinks), "one of them refused")
    assert (service.run_dir.root / "same.jsonl").read_text() == service.run_dir.metrics_rows.read_text()
    for name in ("one", "two"):
        furlong("sinks", "remove", name)


def test_a_sink_cannot_take_the_name_of_the_alerts_place(furlong: Callable[..., tuple[int, str, str]]) -> None:
    code, _, error = furlong("sinks", "add", "jsonl", "--name", "alerts", "--option", "path=copy.jsonl")
    assert (code != 0, "alerts" in error) == (True, True)


def test_no_part_of_a_url_that_may_be_secret_is_listed(furlong: Callable[..., tuple[int, str, str]]) -> None:
    url = "http://user:T0ken1@127.0.0.1:9/hook/T0ken2?key=T0ken3"
    assert furlong("sinks", "add", "webhook", "--name", "hook", "--option", f"url={url}")[0] == 0
    listed = furlong("sinks")[1] + furlong("sinks", "--json")[1]
    assert "url=http://127.0.0.1:9" in listed
    assert "T0ken" not in listed
    furlong("sinks", "remove", "hook")
