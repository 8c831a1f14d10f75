"""The example of a sink of one's own has every number once, over kills and half lines."""

import csv
import os
from pathlib import Path

import pytest

from tests.metrics.running import MetricsProcess, batch, part, send, until

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_sink"


@pytest.mark.slow
def test_csv_has_every_number_once(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    environment = {
        "CSV_ROWS": str(path),
        "PYTHONPATH": os.pathsep.join([str(EXAMPLE), os.environ.get("PYTHONPATH", "")]),
    }
    service = MetricsProcess(tmp_path, environment=environment, metrics_sink=("csv_rows.CsvRows",)).start()
    try:
        given = [part(n, {"train/loss": ["last", n], "train/lr": ["last", 1]}) for n in range(1, 9)]
        send(service, batch(given[:5]))
        service.flush()
        service.kill()
        until(lambda: numbers(path)[-1:] == [(5, "train/lr")], "five rows")
        path.write_bytes(path.read_bytes()[:-4])  # as a power cut leaves it
        service.start()
        send(service, batch(given[5:], first=6))
        until(lambda: numbers(path)[-1:] == [(8, "train/lr")], "eight rows")
        assert numbers(path) == [(n, key) for n in range(1, 9) for key in ("train/loss", "train/lr")]
    finally:
        service.end()


def numbers(path: Path) -> list[tuple[int, str]]:
    with path.open() as file:
        return [(int(line["step"]), line["key"]) for line in csv.DictReader(file) if line["key"]]
