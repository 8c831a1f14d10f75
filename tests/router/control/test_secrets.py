"""Secrets of a real router process leave no trace where none belongs: its token, a worker's key, a query."""

import json
import stat
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from furlong.process import ExitCode
from services.router.control.token import Token
from tests.cli.started_alone import Alone

TOKEN = "t0ken-nobody-may-see"
WRONG = "wr0ng-nobody-may-see"
KEY = "k3y-nobody-may-see"
QUERY = "qu3ry-nobody-may-see"


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Alone]:
    file = tmp_path / "token"
    file.write_text(TOKEN)
    router = Alone(
        tmp_path / "kept", "--token-file", str(file), "--worker-urls", "http://127.0.0.1:1", service="router"
    )
    yield router
    router.end()


def ask(url: str, *, token: str = "", body: object = None) -> int:
    request = urllib.request.Request(url, None if body is None else json.dumps(body).encode())
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            answer.read()
            return answer.status
    except urllib.error.HTTPError as error:
        error.read()
        return error.code


def test_no_secret_is_written_or_shown(alone: Alone) -> None:
    worker = {"url": "http://127.0.0.1:2", "api_key": KEY}
    assert ask(f"{alone.http}/workers", token=WRONG, body=worker) == 401
    assert ask(f"{alone.http}/workers", token=TOKEN, body=worker) == 202
    assert ask(f"{alone.http}/flush_cache?x={QUERY}", token=TOKEN, body={}) == 502
    assert ask(f"{alone.http}/pause_generation?x={QUERY}", token=TOKEN, body={}) == 502
    assert ask(f"{alone.http}/v1/loads?x={QUERY}") == 502
    process = Path("/proc") / str(alone.process.pid)
    shown = process.joinpath("cmdline").read_bytes() + process.joinpath("environ").read_bytes()
    assert alone.end() == ExitCode.DRAINED
    files = [path for path in alone.folder.rglob("*") if path.is_file()]
    assert any(path.name == "workers.json" for path in files) and any(path.parent.name == "logs" for path in files)
    written = {path: path.read_bytes() for path in (*files, alone.stderr)}
    for secret in (TOKEN, WRONG, QUERY, KEY):
        holders = [path for path, content in written.items() if secret.encode() in content]
        assert secret.encode() not in shown and holders == (
            [alone.folder / "router/workers.json"] if secret == KEY else []
        )
    assert stat.S_IMODE((alone.folder / "router/workers.json").stat().st_mode) == 0o600


@pytest.mark.parametrize("token", ["plain", "base64+/==", "a,b;c", "'quoted'"])
def test_the_token_is_found_however_it_is_misspelled(tmp_path: Path, token: str) -> None:
    (tmp_path / "token").write_text(token)
    kept = Token(str(tmp_path / "token"))
    for value in (f"Bearer {token}", token, f"Bearer\t{token}", f'Basic "{token}", x', "x " * 100):
        assert kept.is_within(value.encode()), value
    assert not kept.is_within(b"Bearer sk-user") and not kept.is_within(b"")
