"""A real Prometheus that scrapes one address, asked over its own HTTP API."""

import json
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any  # Any: what JSON holds

from tests import tools


@contextmanager
def prometheus_scraping(folder: Path, http: str) -> Generator[Callable[[str], Any]]:
    """A real one; asks it with a query of its own language."""
    tool = tools.need("prometheus")
    host = urllib.parse.urlsplit(http).netloc
    config = {"scrape_configs": [{"job_name": "f", "scrape_interval": "1s", "static_configs": [{"targets": [host]}]}]}
    (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    address = f"127.0.0.1:{tools.free_port()}"
    flags = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/prometheus"]
    with (folder / "prometheus.log").open("w") as log:
        command = [*tool.command, *flags, f"--web.listen-address={address}"]
        process = subprocess.Popen(command, stdout=log, stderr=log, env=tool.environment)

    def ask(query: str) -> list[dict[str, Any]]:
        url = f"http://{address}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return json.load(answer)["data"]["result"]
        except (urllib.error.URLError, ConnectionError):  # it starts
            assert process.poll() is None, (folder / "prometheus.log").read_text()
            return []

    try:
        yield ask
    finally:
        process.terminate()
        process.wait(20)
