"""The only file that imports wandb: what runs in the process of the wandb sink. Never decides on retries.

A row is logged at wandb's step `row id + offset`, and never at an implicit one. wandb's server remembers the last step
of a run, so that it says itself, at a start, up to which row it has everything: a run that is killed, synced by hand or
continued after an outage has each row once. What is shown over what is told by define_metric, not by that step.
"""

import json
import os
import secrets
import time
import urllib.request
from base64 import b64encode
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any  # Any: wandb's own objects, and JSON

from services.metrics.sinks.wandb_file import contents
from services.metrics.sinks.wandb_names import Names

OFFLINE_FLUSH_S = 1.0
OFFLINE_SAFE_S = 4.0
"""wandb writes a point to its file within OFFLINE_FLUSH_S; measured with a process that is killed."""
LOOK_TIMEOUT_S = 5
TABLE_TRIES = 3
MAX_TEXT_CHARS = 4_000
_DELIVERED = """query FurlongDelivered($project: String!, $entity: String!, $name: String!) {
  model(name: $project, entityName: $entity) { bucket(name: $name, missingOk: true) { historyTail } } }"""


class WandbRun:
    """One run of wandb, from init to finish."""

    def __init__(self) -> None:
        self.trouble = ""
        """What keeps the rows from wandb's server. Empty: nothing that is known."""
        self._handed: deque[tuple[float, int]] = deque()  # when, which row
        self._safe = self._through = 0
        self._looked_at = self._reached_at = self._moved_at = 0.0
        self._is_stuck = False

    def start(self, settings: dict[str, Any]) -> int:
        """Begin or resume the run; the last row that is safe."""
        self._settings, self._folder = settings, Path(settings["folder"])
        self._online = settings["mode"] == "online"
        kept = _read_json(self._folder / "run.json")
        self._kept: dict[str, Any] = {"id": kept.get("id") or secrets.token_hex(4), "offset": kept.get("offset", 0)}
        self._table_tries: dict[str, int] = _read_json(self._folder / "table_tries.json")
        self._names = Names(other=_read_json(self._folder / "names.json"))
        self._save_kept()
        self._run = _begin(settings, self._kept["id"])
        for pattern, axis in self._names.globs():
            self._run.define_metric(axis)
            self._run.define_metric(pattern, step_metric=axis)
        self._safe = self._through = self._found_online() if self._online else self._found_offline()
        self._looked_at = self._reached_at = self._moved_at = time.monotonic()
        return self._safe

    def write(self, rows: Sequence[Mapping[str, Any]]) -> int:
        """Log them; the last row that is safe."""
        for row in rows:
            if row["row"] > self._through:
                if self._log(row) or not self._online:
                    self._handed.append((time.monotonic(), row["row"]))
                self._through = row["row"]
        return self.flush()

    def flush(self) -> int:
        """The last row that is safe."""
        now = time.monotonic()
        if not self._online:
            while self._handed and now - self._handed[0][0] > OFFLINE_SAFE_S:
                self._safe = self._handed.popleft()[1]
        elif not self._handed:
            self._safe = self._through  # what is left are rows that are no points
        else:
            if now - self._looked_at >= self._settings["look_s"]:
                self._look_at_server(now)
            self._refuse_to_be_stuck(now)
        if any(int(row_id) <= self._safe for row_id in self._table_tries):
            self._table_tries = {key: tries for key, tries in self._table_tries.items() if int(key) > self._safe}
            _write_json(self._folder / "table_tries.json", self._table_tries)
        return self._safe

    def close(self) -> int:
        """Finish the run, within finish_timeout_s."""
        self._run.finish()
        if self._online:
            self._look_at_server(time.monotonic())
        else:
            self._safe = self._through
        return self._safe

    def alert(self, given: Mapping[str, Any]) -> None:
        """Raise an alert of wandb's."""
        self._run.alert(title=given["title"][:250], text=given["text"][:MAX_TEXT_CHARS], level=given["level"])

    # -- inside

    def _found_online(self) -> int:
        """Up to which row the server has everything, by the last step of its history."""
        last_step = self._run.starting_step - 1 if self._run.resumed else -1
        found = last_step - self._kept["offset"]
        if found > self._settings["last_row"]:
            # Our store was damaged and lost rows, whose numbers come again; or files that overlap were synced by hand.
            found = min(max(self._settings["durable_row"], self._settings["offline_row"]), self._settings["last_row"])
            self._kept["offset"] = last_step - found
            self._save_kept()
        return max(0, found)

    def _found_offline(self) -> int:
        """Up to which row wandb's files have everything, by our own note, or by themselves after a kill."""
        settings, run_id = self._settings, self._kept["id"]
        noted = max(settings["durable_row"], settings["finished_row"])
        for path in sorted(
            Path(settings["dir"]).glob(f"wandb/offline-run-*-{run_id}/run-{run_id}.wandb"), reverse=True
        ):
            if (last_step := _last_step(path)) is not None:
                noted = max(noted, last_step - self._kept["offset"])
                break
        return min(noted, settings["last_row"])

    def _log(self, row: Mapping[str, Any]) -> bool:
        """One row. False: what a newer attempt has replaced, and what says nothing new, is no point."""
        if not row["current"] or not (row["values"] or row["histograms"] or row["tables"]):
            return False
        body = row["body"]
        axis = body["axis"]
        known = len(self._names.other)
        point: dict[str, Any] = self._names.beside(body)
        new_axes = [name for name in point if self._names.undefined(name, axis)]
        media = {**_histograms(row["histograms"]), **self._tables(row)}
        for name, value in {**row["values"], **media}.items():
            shown = self._names.shown(name, axis)
            if self._names.undefined(shown, axis):
                new_axes.append(shown)
            point[shown] = value
        if len(self._names.other) != known:
            _write_json(self._folder / "names.json", self._names.other)
        for name in new_axes:
            if name == axis:
                self._run.define_metric(axis)
            else:
                self._run.define_metric(name, step_metric=axis)
        self._run.log(point, step=row["row"] + self._kept["offset"], commit=True)
        return True

    def _tables(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """wandb sends a table at once, as an artifact. One that the server or wandb itself breaks on again and again is
        left out, so that the row's numbers arrive."""
        if not row["tables"]:
            return {}
        import wandb

        row_id, tries = row["row"], self._table_tries
        tries[str(row_id)] = tries.get(str(row_id), 0) + 1
        if tries[str(row_id)] > TABLE_TRIES:
            print(f"left out the tables of row {row_id}: they did not arrive {TABLE_TRIES} times", flush=True)
            return {}
        _write_json(self._folder / "table_tries.json", tries)
        return {
            name: wandb.Table(columns=table["columns"], data=table["rows"], allow_mixed_types=True)
            for name, table in row["tables"].items()
        }

    def _look_at_server(self, now: float) -> None:
        """How far the server is."""
        self._looked_at = now
        try:
            last_step = self._ask_server()
        except (OSError, ValueError) as error:  # also HTTP errors and time-outs
            self._reached_at = 0.0
            self.trouble = f"wandb's server does not answer: {error}"
            return
        self._reached_at = self._reached_at or now
        self.trouble = ""
        if last_step is None:  # it does not say: what wandb took has to do
            last_step = self._through + self._kept["offset"]
        if last_step - self._kept["offset"] > self._safe:
            self._safe, self._moved_at = last_step - self._kept["offset"], now
        while self._handed and self._handed[0][1] <= self._safe:
            self._handed.popleft()
        if not self._handed:
            self._safe = self._through

    def _refuse_to_be_stuck(self, now: float) -> None:
        """Raises when the server can be reached, and wandb sends it nothing any more: it is then started anew."""
        if self._is_stuck:
            raise TimeoutError("wandb has sent nothing for long, though its server answers")
        if not self._handed or not self._reached_at:
            return
        waited_s = now - max(self._reached_at, self._moved_at, self._handed[0][0])
        if waited_s > self._settings["stuck_s"]:
            self._is_stuck = True
            raise TimeoutError(f"wandb has sent nothing for {waited_s:.0f} s, though its server answers")

    def _ask_server(self) -> int | None:
        """The last step of the history; None: it does not say."""
        settings = self._run.settings
        names = {"project": self._run.project, "entity": self._run.entity, "name": self._run.id}
        body = json.dumps({"query": _DELIVERED, "variables": names}).encode()
        headers = {"Content-Type": "application/json", "User-Agent": "furlong"}
        if key := _key(settings):
            headers["Authorization"] = "Basic " + b64encode(f"api:{key}".encode()).decode()
        url = str(settings.base_url).rstrip("/") + "/graphql"
        request = urllib.request.Request(url, body, headers)
        with urllib.request.urlopen(request, timeout=LOOK_TIMEOUT_S) as answer:
            found = json.loads(answer.read(4 * 1024 * 1024))
        bucket = ((found.get("data") or {}).get("model") or {}).get("bucket") or {}
        try:
            tail = json.loads(bucket.get("historyTail") or "[]")
            return int(json.loads(tail[-1])["_step"]) if tail else -1
        except (ValueError, KeyError, IndexError, TypeError):
            return None

    def _save_kept(self) -> None:
        _write_json(self._folder / "run.json", self._kept)


def _begin(settings: Mapping[str, Any], run_id: str) -> Any:
    key_file = os.environ.get("WANDB_API_KEY_FILE", "")
    if key_file and not os.environ.get("WANDB_API_KEY"):
        os.environ["WANDB_API_KEY"] = Path(key_file).read_text().strip()
    import wandb

    return wandb.init(
        id=run_id,
        resume="allow",
        project=settings["project"],
        group=settings["group"] or None,
        entity=settings["team"] or None,
        name=settings["name"],
        dir=settings["dir"],
        mode=settings["mode"],
        config=settings["config"],
        settings=wandb.Settings(
            init_timeout=settings["init_timeout_s"],
            finish_timeout=settings["finish_timeout_s"],
            finish_timeout_raises=False,
            console="off",
            disable_code=True,
            disable_git=True,
            silent=True,
            x_save_requirements=False,
            x_transaction_log_flush_interval=OFFLINE_FLUSH_S,
            x_file_stream_retry_wait_max_seconds=10,
            x_file_stream_timeout_seconds=20,
            x_graphql_retry_wait_max_seconds=10,
            x_graphql_timeout_seconds=20,
        ),
    )


def _last_step(path: Path) -> int | None:
    """The step of the last point in a file of wandb's; None: there is none that can be read."""
    from google.protobuf.message import DecodeError
    from wandb.proto import wandb_internal_pb2

    last_step: int | None = None
    make_record: Any = getattr(wandb_internal_pb2, "Record")  # noqa: B009 - generated, unknown to the type checker
    try:
        for content in contents(path):
            record = make_record()
            record.ParseFromString(content)
            if record.WhichOneof("record_type") == "history":
                last_step = record.history.step.num
    except (OSError, DecodeError):
        pass  # what stands before the damage counts
    return last_step


def _key(settings: Any) -> str:
    """The key that wandb itself uses: of the environment, its settings or its netrc."""
    if key := os.environ.get("WANDB_API_KEY") or getattr(settings, "api_key", None):
        return str(key)
    import wandb

    return str(wandb.Api(timeout=LOOK_TIMEOUT_S).api_key or "")


def _histograms(given: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    if not given:
        return {}
    import wandb

    return {name: wandb.Histogram(np_histogram=(found["counts"], found["edges"])) for name, found in given.items()}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    scratch = path.with_name(f".{path.name}.new")
    with scratch.open("w") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(scratch, path)
