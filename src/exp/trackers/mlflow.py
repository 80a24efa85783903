"""MLflow: a server by its address, or a database in a folder."""

from __future__ import annotations

import fcntl
import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Mapping, Sequence

from exp.trackers.base import TrackedRun, Tracker

if TYPE_CHECKING:
    from mlflow import MlflowClient

__all__ = ["MlflowTracker"]

_STATUS = {"completed": "FINISHED", "failed": "FAILED"}
_MOST_PARAMETERS = 100  # of one request, MLflow's own bound
_MOST_METRICS = 1000
_FOREIGN = re.compile(r"[^\w\-. /]")  # what MLflow takes in no name
_LONGEST = 500  # of a value; what the oldest servers take


class MlflowTracker(Tracker):
    """An MLflow run for each run; those of a sweep have the tag ``sweep``.

    Args:
        uri: of a tracking server, such as ``http://host:5000``; None: what ``MLFLOW_TRACKING_URI`` says; without
            either, the database ``mlflow.db`` in ``store``.
        store: a folder, below which the files of runs lie, too; made where it is not there.
        experiment: the name under which MLflow gathers runs; None: that of the experiment.
        tags: further tags of the run.
    """

    requires: ClassVar[Mapping[str, str]] = {"mlflow": "mlflow"}

    def __init__(
        self,
        uri: str | None = None,
        store: str = "outputs/mlflow",
        experiment: str | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        self.store = Path(store).absolute()
        self.uri = uri or os.environ.get("MLFLOW_TRACKING_URI") or ""
        self.embedded = not self.uri
        if self.embedded:
            self.uri = f"sqlite:///{self.store / 'mlflow.db'}"
        self.experiment = experiment
        self.tags = dict(tags or {})
        self.run_id = ""
        self._waiting: list[Any] = []
        self._client: MlflowClient | None = None

    @property
    def client(self) -> MlflowClient:
        """MLflow's client; the database is made where it is not there."""
        if self._client is None:
            from mlflow import MlflowClient

            if not self.embedded:
                self._client = MlflowClient(tracking_uri=self.uri)
                return self._client
            self.store.mkdir(parents=True, exist_ok=True)
            with (self.store / ".lock").open("w") as lock:  # the first of several runs makes the tables
                fcntl.flock(lock, fcntl.LOCK_EX)
                self._client = MlflowClient(tracking_uri=self.uri)
                self._client.search_experiments(max_results=1)
        return self._client

    def open(self, run: TrackedRun, known: str | None) -> str:
        """A new run with the configuration as its parameters; a run that is known is continued."""
        self._waiting = []
        if known is None:
            experiment = self._begin(run)
        else:
            self.run_id, experiment = known, self.client.get_run(known).info.experiment_id
            self.client.update_run(known, status="RUNNING")
        if self.embedded:  # the command that shows it
            self.address = f"run {self.run_id}; mlflow ui --backend-store-uri {self.uri}"
        else:
            self.address = f"{self.uri.rstrip('/')}/#/experiments/{experiment}/runs/{self.run_id}"
        return self.run_id

    def _begin(self, run: TrackedRun) -> str:
        """Make the run; returns the id of its experiment."""
        experiment = self._experiment(self.experiment or run.experiment)
        tags = {**run.facts, **self.tags, "mlflow.source.name": "exp", "mlflow.user": _user()}
        made = self.client.create_run(experiment, tags=tags, run_name=run.name)
        self.run_id = made.info.run_id
        from mlflow.entities import Param

        parameters = [Param(_FOREIGN.sub("_", key), str(value)[:_LONGEST]) for key, value in run.keys.items()]
        try:
            for start in range(0, len(parameters), _MOST_PARAMETERS):
                self.client.log_batch(self.run_id, params=parameters[start : start + _MOST_PARAMETERS])
        except Exception:
            self.client.delete_run(self.run_id)  # task=track begins another one
            raise
        return experiment

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Gathered until :meth:`flush`."""
        from mlflow.entities import Metric

        at = int(time.time() * 1000)
        self._waiting += [Metric(_FOREIGN.sub("_", name), value, at, step) for name, value in values.items()]

    def flush(self) -> None:
        """In batches."""
        waiting, self._waiting = self._waiting, []
        for start in range(0, len(waiting), _MOST_METRICS):
            self.client.log_batch(self.run_id, metrics=waiting[start : start + _MOST_METRICS])

    def close(self, status: str, result: Mapping[str, Any], files: Sequence[Path], pictures: Sequence[Path]) -> None:
        """With files as artifacts, and the run's ``metric``, by which runs can be sorted."""
        for path in (*files, *pictures):
            self.client.log_artifact(self.run_id, str(path), "plots" if path in pictures else None)
        if result.get("metric") is not None:
            self.client.log_metric(self.run_id, "metric", float(result["metric"]), step=int(result.get("steps") or 0))
        self.client.set_tag(self.run_id, "status", status)
        error = (result.get("error") or {}).get("message")
        if error:
            self.client.set_tag(self.run_id, "error", str(error)[:_LONGEST])
        self.client.set_terminated(self.run_id, _STATUS.get(status, "KILLED"))

    def _experiment(self, name: str) -> str:
        known = self.client.get_experiment_by_name(name)
        if known is not None:
            return str(known.experiment_id)
        place = (self.store / "files" / name.replace("/", "_")).as_uri() if self.embedded else None
        from mlflow.exceptions import MlflowException

        try:
            return str(self.client.create_experiment(name, artifact_location=place))
        except MlflowException:  # a run beside this one has just made it
            known = self.client.get_experiment_by_name(name)
            if known is None:
                raise
            return str(known.experiment_id)


def _user() -> str:
    import getpass

    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a number without a name, as in containers
        return str(os.getuid())
