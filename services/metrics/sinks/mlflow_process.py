"""What runs in the process of the MLflow sink. The only file that imports mlflow.

One MLflow run for each of our runs, found again by a tag when what we kept is lost. A metric has the row's own time and
step, and MLflow keeps one of equals: rows that are sent again after a kill change nothing. MLflow cannot take a value
back, so a resume behind the last step adds the new attempt's values to the old ones; at a step the newest time counts,
and AXIS/attempt says to which attempt the values of a step belong.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any  # Any: MLflow's objects, and JSON

import orjson

from furlong.rundir import write_atomically
from furlong.sinks import Refused
from services.metrics.sinks.mlflow_names import MAX_BATCH_METRICS, MAX_BATCH_PARAMS, MAX_NAME_CHARS, fold_metric
from services.metrics.sinks.names import Names

IDENTITY_TAG = "furlong.identity"
RAW_NAME_TAG = "furlong.raw_name."
_LIMITS = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "15", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
"""The sink's task tries again; here it would only be waited for."""
_REFUSALS = ("INVALID_PARAMETER_VALUE", "BAD_REQUEST")
_GONE = "RESOURCE_DOES_NOT_EXIST"


class Mlflow:
    """Owns the client, and which run is which there."""

    def __init__(self) -> None:
        self._client: Any = None
        self._settings: Mapping[str, Any] = {}
        self._experiment_id = ""
        self._identities: dict[str, str] = {}
        self._runs: dict[str, str] = {}
        self._kept: dict[str, str] = {}
        self._kept_path = Path()
        self._names = Names(fold_metric, max_chars=MAX_NAME_CHARS)
        self._told_names: dict[str, set[str]] = {}
        self._deleted: set[str] = set()

    def start(self, settings: Mapping[str, Any]) -> None:
        """Settings: uri, experiment, params, own_run. Finds or makes the experiment."""
        for name, value in _LIMITS.items():
            os.environ.setdefault(name, value)
        os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"  # it would report to its makers
        no_proxy = [os.environ.get("no_proxy", ""), os.environ.get("NO_PROXY", ""), "127.0.0.1,localhost,::1"]
        os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join(filter(None, no_proxy))
        from mlflow import MlflowClient

        folder = Path(settings["folder"])
        self._settings, self._client = settings, MlflowClient(tracking_uri=settings["uri"])
        self._names = Names(fold_metric, max_chars=MAX_NAME_CHARS, kept_in=folder / "names.json")
        self._kept_path = folder / "mlflow_runs.json"
        self._kept = orjson.loads(self._kept_path.read_bytes()) if self._kept_path.exists() else {}
        self._experiment_id = self._find_experiment(settings["experiment"])

    def identify(self, given: Mapping[str, str]) -> None:
        """Which runs are which."""
        self._identities |= given

    def ended(self, given: Mapping[str, str]) -> None:
        """Runs that ended, or began again, and how."""
        from mlflow.exceptions import MlflowException

        for run, status in given.items():
            run_id = self._run_id(run)
            if run in self._deleted:
                continue  # its rows say so
            try:
                self._client.update_run(run_id, status=status)
            except MlflowException as error:
                if error.error_code not in _REFUSALS:
                    raise
                print(f"MLflow refused {status} of {run}: {str(error)[:300]}", flush=True)

    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Log the values of the rows, each run's in its own run there."""
        shown = [row for row in rows if row["current"] and row["values"]]
        at = 0
        while at < len(shown):
            run, piece, size = shown[at]["body"]["run"], [], 0
            while at < len(shown) and shown[at]["body"]["run"] == run and (not piece or size < MAX_BATCH_METRICS):
                piece.append(shown[at])
                size += len(shown[at]["values"]) + 1
                at += 1
            self._log(run, piece)

    def _log(self, run: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """A piece of one run; halved when MLflow refuses it, until a row stands alone."""
        from mlflow.exceptions import MlflowException

        run_id = self._run_id(run)
        if run in self._deleted:
            raise Refused(rows[0]["row"], "its MLflow run was deleted; restore it, or add the sink anew")
        try:
            self._name_all(run_id, rows)
            metrics = [metric for row in rows for metric in self._metrics(row)]
            for at in range(0, len(metrics), MAX_BATCH_METRICS):
                self._client.log_batch(run_id, metrics=metrics[at : at + MAX_BATCH_METRICS], synchronous=True)
        except MlflowException as error:
            if error.error_code not in _REFUSALS:
                raise
            if len(rows) == 1:
                raise Refused(rows[0]["row"], f"MLflow: {error.error_code}: {str(error)[:300]}") from error
            middle = len(rows) // 2
            self._log(run, rows[:middle])
            self._log(run, rows[middle:])

    def _metrics(self, row: Mapping[str, Any]) -> list[Any]:
        from mlflow.entities import Metric

        body, time_ms = row["body"], int(row["ts"] * 1000)
        values = {**row["values"], f"{body['axis'].split('/')[0]}/attempt": body["attempt"]}
        return [Metric(self._names.folded(raw), float(v), time_ms, body["step"]) for raw, v in values.items()]

    def _name_all(self, run_id: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Keep the names, and have the run say the raw ones of those that were folded."""
        from mlflow.entities import RunTag

        told = self._told_names.setdefault(run_id, set())
        raws = {raw for row in rows for raw in row["values"]} - told
        tags = [
            RunTag((RAW_NAME_TAG + folded)[:MAX_NAME_CHARS], raw[:5000])
            for raw in sorted(raws)
            if (folded := self._names.folded(raw)) != raw
        ]
        self._names.save()
        for at in range(0, len(tags), MAX_BATCH_PARAMS):
            self._client.log_batch(run_id, tags=tags[at : at + MAX_BATCH_PARAMS], synchronous=True)
        told |= raws

    def _run_id(self, run: str) -> str:
        if run not in self._runs:
            self._runs[run] = self._open_run(run)
        return self._runs[run]

    def _open_run(self, run: str) -> str:
        """The one that was kept, one that has our tag, or a new one; running again."""
        identity = f"{run}@{self._identities.get(run, '0')}"
        found = self._get(self._kept.get(identity)) or self._find_run(identity)
        if found is None:
            tags = {IDENTITY_TAG: identity, "furlong.run": run}
            found = self._client.create_run(self._experiment_id, run_name=run, tags=tags)
        run_id = str(found.info.run_id)
        if self._kept.get(identity) != run_id:
            self._kept[identity] = run_id
            write_atomically(self._kept_path, orjson.dumps(self._kept))
        if found.info.lifecycle_stage == "deleted":
            self._deleted.add(run)
        elif run == self._settings["own_run"]:
            self._log_params(run_id, found.data.params)
        return run_id

    def _get(self, run_id: str | None) -> Any:
        """None: there is no such run, for nobody asked or it was removed for good."""
        from mlflow.exceptions import MlflowException

        try:
            return self._client.get_run(run_id) if run_id else None
        except MlflowException as error:
            if error.error_code == _GONE:
                return None
            raise

    def _find_run(self, identity: str) -> Any:
        quoted = identity.replace("\\", "\\\\").replace("'", "\\'")
        found = self._client.search_runs(
            [self._experiment_id], filter_string=f"tags.`{IDENTITY_TAG}` = '{quoted}'", max_results=1
        )
        return found[0] if found else None

    def _log_params(self, run_id: str, known: Mapping[str, str]) -> None:
        """MLflow lets no parameter change: one that did between two starts is said in a tag."""
        from mlflow.entities import Param, RunTag

        params: Mapping[str, str] = self._settings["params"]
        new = [Param(name, value) for name, value in params.items() if name not in known]
        changed = [
            RunTag(f"furlong.changed.{name}"[:MAX_NAME_CHARS], value)
            for name, value in params.items()
            if known.get(name, value) != value
        ]
        for at in range(0, max(len(new), len(changed)), MAX_BATCH_PARAMS):
            piece = slice(at, at + MAX_BATCH_PARAMS)
            self._client.log_batch(run_id, params=new[piece], tags=changed[piece][:50], synchronous=True)

    def _find_experiment(self, name: str) -> str:
        from mlflow.exceptions import MlflowException

        found = self._client.get_experiment_by_name(name)
        if found is None:
            try:
                return str(self._client.create_experiment(name))
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
            found = self._client.get_experiment_by_name(name)
        if found.lifecycle_stage == "deleted":
            raise RuntimeError(f"the MLflow experiment {name!r} was deleted: restore it, or name another")
        return str(found.experiment_id)
