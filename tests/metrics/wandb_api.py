"""A stand-in for the W&B API: enough for runs of wandb 0.31 to start, log, resume and finish, and to misbehave at will.

Keeps what it was sent, so that a test can read it back as W&B would show it.
"""

import contextlib
import gzip
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any  # Any: JSON

KEY = "k" * 40
HANG_S = 300.0


@dataclass
class StoredRun:
    """One run, as the API has it."""

    name: str
    project: str = ""
    group: str = ""
    entity: str = ""
    display_name: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    history: dict[int, str] = field(default_factory=dict)
    """Line number -> line. A line that is sent again takes its own place."""
    summary: dict[str, Any] = field(default_factory=dict)
    num_starts: int = 0
    num_completed: int = 0
    alerts: list[dict[str, Any]] = field(default_factory=list)
    files: list[str] = field(default_factory=list)

    @property
    def points(self) -> list[dict[str, Any]]:
        """The history in order, without wandb's own keys but `_step`."""
        lines = [json.loads(self.history[number]) for number in sorted(self.history)]
        return [{k: v for k, v in line.items() if k == "_step" or not k.startswith("_")} for line in lines]

    def axes(self) -> dict[str, str]:
        """Name or pattern -> the axis it is drawn over, by what define_metric said."""
        metrics = self.config.get("_wandb", {}).get("value", {}).get("m", [])
        names = [metric.get("1") or metric.get("2") for metric in metrics]
        found = {}
        for metric, name in zip(metrics, names, strict=True):
            axis = metric.get("4") or (names[metric["5"] - 1] if metric.get("5") else None)
            if axis:
                found[name] = axis
        return found


class WandbApi:
    """The server; `with WandbApi() as api`. Its modes can be changed at any time."""

    def __init__(self) -> None:
        self.runs: dict[str, StoredRun] = {}
        self.requests: list[str] = []
        self.authorizations: set[str] = set()
        self.status: Callable[[str], int] = lambda what: 200
        """Status code for a call: `graphql Viewer`, `file_stream`, `upload`, ..."""
        self.hangs: Callable[[str], bool] = lambda what: False
        self.delay_s = 0.0
        self.breaks_tables = False
        self._lock = threading.Lock()
        self._freed = threading.Event()
        self._server: _Server | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        return {"WANDB_BASE_URL": self.url, "WANDB_API_KEY": KEY}

    def __enter__(self) -> "WandbApi":
        self.up()
        return self

    def __exit__(self, *error: object) -> None:
        self.down()

    def up(self) -> None:
        """Listen, on the port of before."""
        self._freed.clear()
        self._server = _Server(("127.0.0.1", self.port), _handler(self))
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def down(self) -> None:
        """Refuse connections, and drop those that are open."""
        self._freed.set()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server.drop()
            self._server = None

    def only_run(self) -> StoredRun:
        (run,) = self.runs.values()
        return run

    def steps(self, axis: str = "train/step") -> list[int]:
        """The steps of the only run's history on one axis, in order; empty: there is no run yet."""
        if not self.runs:
            return []
        with self._lock:
            return [point[axis] for point in self.only_run().points if axis in point]

    def take(self, what: str, path: str, body: bytes, authorization: str) -> tuple[int, dict[str, Any]]:
        """Answer one call."""
        self.requests.append(what)
        self.authorizations.add(authorization)
        if self.delay_s:
            self._freed.wait(self.delay_s)
        if self.hangs(what):
            self._freed.wait(HANG_S)
            return 500, {}
        code = self.status(what)
        if code != 200:
            return code, {"error": f"mode {code}"}
        with self._lock:
            if path.startswith("/graphql"):
                asked = json.loads(body)
                answer = self._graphql(what.split()[-1], asked.get("variables") or {}, asked["query"])
                return 200, {"data": answer}
            if what == "file_stream":
                self._stream(path.split("/")[-2], json.loads(body))
            return 200, {}

    def _stream(self, name: str, sent: dict[str, Any]) -> None:
        run = self.runs[name]
        files = sent.get("files", {})
        if history := files.get("wandb-history.jsonl"):
            for number, line in enumerate(history["content"], history["offset"]):
                run.history[number] = line
        if summary := files.get("wandb-summary.json"):
            run.summary.update(json.loads(summary["content"][-1]))
        run.files += sent.get("uploaded", [])
        run.num_completed += bool(sent.get("complete"))

    def _graphql(self, name: str, given: dict[str, Any], query: str) -> dict[str, Any]:
        answers: dict[str, Callable[[], dict[str, Any]]] = {
            "Viewer": lambda: {"viewer": _VIEWER},
            "RunResumeStatus": lambda: self._resume(given),
            "UpsertBucket": lambda: self._upsert(given),
            "CreateRunFiles": lambda: self._uploads(given),
            "NotifyScriptableRunAlert": lambda: self._alert(given),
            "ArtifactType": lambda: {"project": {"artifact": None}},
            "CreateArtifact": lambda: {} if self.breaks_tables else {"createArtifact": {"artifact": _ARTIFACT}},
            "ServerFeaturesQuery": lambda: {"serverInfo": {"features": []}},
        }
        if name in answers:
            return answers[name]()
        return self._resume(given) if "historyTail" in query else {}

    def _resume(self, given: dict[str, Any]) -> dict[str, Any]:
        run = self.runs.get(given["name"])
        if run is None:
            return {"model": None}
        tail = [run.history[max(run.history)]] if run.history else []
        bucket = {
            "name": run.name,
            "summaryMetrics": json.dumps(run.summary),
            "displayName": run.display_name,
            "logLineCount": 0,
            "historyLineCount": len(run.history),
            "eventsLineCount": 0,
            "historyTail": json.dumps(tail),
            "eventsTail": "[]",
            "config": json.dumps(run.config),
            "tags": [],
            "notes": None,
            "wandbConfig": json.dumps({"t": 1}),
        }
        return {"model": {"name": run.project, "entity": {"name": "team"}, "bucket": bucket}}

    def _upsert(self, given: dict[str, Any]) -> dict[str, Any]:
        name = given["name"]
        is_new = name not in self.runs
        run = self.runs.setdefault(name, StoredRun(name))
        run.num_starts += given.get("program") is not None
        run.project = given.get("project") or run.project
        run.group = given.get("groupName") or run.group
        run.entity = given.get("entity") or run.entity
        run.display_name = given.get("displayName") or run.display_name
        run.config.update(json.loads(given.get("config") or "{}"))
        project = {"id": "P", "name": run.project, "entity": {"id": "E", "name": "team"}}
        bucket = {
            "id": "QnVja2V0",
            "name": name,
            "displayName": run.display_name,
            "description": "",
            "config": json.dumps(run.config),
            "sweepName": "",
            "historyLineCount": len(run.history),
            "project": project,
        }
        return {"upsertBucket": {"bucket": bucket, "inserted": is_new}}

    def _uploads(self, given: dict[str, Any]) -> dict[str, Any]:
        files = [{"name": name, "uploadUrl": f"{self.url}/upload/{name}"} for name in given.get("files", [])]
        return {"createRunFiles": {"runID": "QnVja2V0", "uploadHeaders": [], "files": files}}

    def _alert(self, given: dict[str, Any]) -> dict[str, Any]:
        self.runs[given["runName"]].alerts.append(given)
        return {"notifyScriptableRunAlert": {"success": True}}


_ARTIFACT = {"id": "A1", "state": "COMMITTED", "artifactSequence": {"latestArtifact": None}}
_VIEWER = {
    "id": "u1",
    "entity": "team",
    "username": "u",
    "flags": "{}",
    "email": "a@b",
    "name": "u",
    "teams": {"edges": []},
    "apiKeys": {"edges": []},
}


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, *arguments: Any) -> None:
        self._open: set[Any] = set()
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def drop(self) -> None:
        """Close what is open."""
        for connection in list(self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(2)
                connection.close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away."""


def _handler(api: WandbApi) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_POST(self) -> None:
            body = self._body()
            what = _what(self.path, body)
            code, answer = api.take(what, self.path, body, self.headers.get("Authorization", ""))
            content = json.dumps(answer).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_PUT = do_POST

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") == "chunked":
                body = b"".join(self._chunks())
            else:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            return gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body

        def _chunks(self) -> Iterator[bytes]:
            while size := int(self.rfile.readline().strip() or b"0", 16):
                yield self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()

    return Handler


def _what(path: str, body: bytes) -> str:
    if path.startswith("/graphql"):
        found = re.search(rb"(?:query|mutation)\s+(\w+)", body)
        return f"graphql {found.group(1).decode() if found else '?'}"
    if path.endswith("/file_stream"):
        return "file_stream"
    return "upload" if path.startswith("/upload") else path.split("?")[0]


def wait_steps(api: WandbApi, steps: list[int], *, axis: str = "train/step", limit_s: float = 30.0) -> None:
    """Wait until the history has these steps, in this order, and no others."""
    deadline = time.monotonic() + limit_s
    while api.steps(axis) != steps:
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {limit_s:g} s: {steps} in the history; it has {api.steps(axis)}")
        time.sleep(0.05)
