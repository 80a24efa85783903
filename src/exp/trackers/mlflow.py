"""MLflow: a tracking server, or a local database."""

from __future__ import annotations

import fcntl
import os
import re
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Mapping, Sequence

from exp.trackers import TrackedRun, Tracker

__all__ = ["MlflowTracker"]

_FOREIGN = re.compile(r"[^\w\-. /]")  # characters that MLflow refuses in names
_LONGEST = 500  # characters of a value that the oldest servers accept


@dataclass
class MlflowTracker(Tracker):
    """MLflow. Runs of one sweep have the same tag ``sweep``.

    Args:
        uri: URI of a tracking server, such as ``http://host:5000``; None: ``MLFLOW_TRACKING_URI``. If neither is set,
            the database ``mlflow.db`` in ``store`` is used.
        store: folder of the local database and of the files of its runs; created if needed.
        experiment: name of the MLflow experiment; None: name of the experiment in the configuration.
        tags: further tags of the run.
    """

    uri: str | None = None
    store: str = "outputs/mlflow"
    experiment: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)

    requires: ClassVar[Sequence[str]] = ["mlflow"]

    def open(self, run: TrackedRun, known: str | None) -> str:
        """Create a run with the configuration as its parameters, or continue the known one."""
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._waiting: list[Any] = []
        name, uri = self.experiment or run.experiment, self.uri or os.environ.get("MLFLOW_TRACKING_URI") or ""
        store, place, lock = Path(self.store).absolute(), None, None
        if not uri:
            store.mkdir(parents=True, exist_ok=True)
            uri, place = f"sqlite:///{store / 'mlflow.db'}", (store / "files" / name.replace("/", "_")).as_uri()
            lock = (store / ".lock").open("w")
            fcntl.flock(lock, fcntl.LOCK_EX)  # the first client creates the tables; parallel runs must not do it twice
        with lock or nullcontext():
            self._client = MlflowClient(tracking_uri=uri)
            experiment = self._experiment(name, place)
        if known is None:
            tags = {**run.facts, **self.tags, "mlflow.source.name": "exp", "mlflow.user": os.environ.get("USER", "")}
            known = str(self._client.create_run(experiment, tags=tags, run_name=run.name).info.run_id)
            parameters = [Param(_FOREIGN.sub("_", key), str(value)[:_LONGEST]) for key, value in run.keys.items()]
            self._client.log_batch(known, params=parameters)
        else:
            self._client.update_run(known, status="RUNNING")
        self._id, page = known, f"{uri.rstrip('/')}/#/experiments/{experiment}/runs/{known}"
        self.address = page if place is None else f"run {known}; mlflow ui --backend-store-uri {uri}"
        return known

    def _experiment(self, name: str, place: str | None) -> str:
        """The id of the MLflow experiment, which is created if it does not exist."""
        from mlflow.exceptions import MlflowException

        found = self._client.get_experiment_by_name(name)
        try:
            return str(found.experiment_id if found else self._client.create_experiment(name, artifact_location=place))
        except MlflowException:  # a parallel run has just created it
            return str(self._client.get_experiment_by_name(name).experiment_id)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Buffer scalars until :meth:`flush`."""
        from mlflow.entities import Metric

        at = int(time.time() * 1000)
        self._waiting += [Metric(_FOREIGN.sub("_", name), value, at, step) for name, value in values.items()]

    def flush(self) -> None:
        """Send the buffered scalars; the client splits them into batches of the allowed size."""
        self._client.log_batch(self._id, metrics=self._waiting)
        self._waiting = []

    def close(self, status: str, result: Mapping[str, Any], files: Sequence[Path], pictures: Sequence[Path]) -> None:
        """Upload files as artifacts, log ``metric`` so that runs can be sorted by it, and end the run."""
        for path in (*files, *pictures):
            self._client.log_artifact(self._id, str(path), "plots" if path in pictures else None)
        if result.get("metric") is not None:
            self._client.log_metric(self._id, "metric", float(result["metric"]), step=int(result.get("steps") or 0))
        error = result.get("error") or {}
        for key, text in {"status": status, "error": error.get("message")}.items():
            if text:
                self._client.set_tag(self._id, key, str(text)[:_LONGEST])
        self._client.set_terminated(self._id, {"completed": "FINISHED", "failed": "FAILED"}.get(status, "KILLED"))
