"""The trackers TensorBoard, MLflow, Weights & Biases and SwanLab. A client is imported when its tracker opens a run."""

from __future__ import annotations

import fcntl
import os
import re
import time
import uuid
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Mapping, Sequence

from exp.trackers import TrackedRun, Tracker, final_metrics

__all__ = ["MlflowTracker", "SwanlabTracker", "TensorboardTracker", "WandbTracker"]

_FOREIGN = re.compile(r"[^\w\-. /]")  # characters that MLflow refuses in names
_LONGEST = 500  # characters of a value that the oldest MLflow servers accept


class TensorboardTracker(Tracker):
    """Writes event files to ``tensorboard`` in the run folder; ``--logdir`` of a sweep's folder shows all its runs."""

    requires: ClassVar[Sequence[str]] = ["tensorboard"]

    def open(self, run: TrackedRun, known: str | None) -> str:
        """Open a new event file; TensorBoard shows all files of a run as one. A new run logs its configuration as text.

        Returns:
            The folder of the event files.
        """
        from torch.utils.tensorboard import SummaryWriter

        folder = run.folder / "tensorboard"
        self._writer, self._keys = SummaryWriter(str(folder)), run.keys
        self.address = f"tensorboard --logdir {folder}"  # the command that shows it
        if known is None:
            rows = [f"| {key} | {value} |" for key, value in run.keys.items()]
            self._writer.add_text("configuration", "\n".join(["| key | value |", "|---|---|", *rows]))
        return str(folder)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log scalars."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        """Write buffered events to the disk."""
        self._writer.flush()

    def close(self, status: str, result: Mapping[str, Any], files: Sequence[Path], pictures: Sequence[Path]) -> None:
        """Add pictures and status; a completed run also gets configuration and final metrics in the HPARAMS tab."""
        import numpy as np
        from PIL import Image

        for picture in pictures:
            pixels = np.asarray(Image.open(picture).convert("RGB"))
            self._writer.add_image(f"plots/{picture.stem}", pixels, int(result.get("steps") or 0), dataformats="HWC")
        if status == "completed":
            self._writer.add_hparams(dict(self._keys), final_metrics(result, "final/"), run_name=".")
        self._writer.add_text("status", status)
        self._writer.close()


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


@dataclass
class _AccountTracker(Tracker):
    """Common part of the two trackers with user accounts and projects. Runs of one sweep are a group at the tracker.

    Args:
        project: name of the project; None: name of the experiment.
        mode: mode of the client, such as ``online`` or ``offline``. None: ``WANDB_MODE`` or ``SWANLAB_MODE``; if it is
            not set, ``online`` if there is an API key, else ``offline``.
        tags: further tags of the run, besides backend and task.
    """

    project: str | None = None
    mode: str | None = None
    tags: Sequence[str] = ()

    def _begin(self, client: Any, run: TrackedRun, known: str | None, logged_in: bool, place: str, **more: Any) -> str:
        """Create the run or continue it; ``place`` is the path prefix of offline runs, for :attr:`address`."""
        client_name = client.__name__
        name, has_key = known or uuid.uuid4().hex[:12], logged_in or os.environ.get(f"{client_name.upper()}_API_KEY")
        mode = self.mode or os.environ.get(f"{client_name.upper()}_MODE") or ("online" if has_key else "offline")
        about: dict[str, Any] = {"name": run.name, "group": run.facts.get("sweep"), "config": dict(run.keys)}
        about["tags"] = [*self.tags, run.facts["backend"], run.facts["task"]]
        project = (self.project or run.experiment).replace("/", "-")
        self._run = client.init(project=project, id=name, resume="allow", mode=mode, **about, **more)
        # Only an online run has a URL; SwanLab's ``url`` raises otherwise.
        self.address = str(self._run.url) if mode == "online" else f"{client_name} sync {place}-*-{name}"
        return name


@dataclass
class WandbTracker(_AccountTracker):
    """Weights & Biases. Without an API key (``WANDB_API_KEY`` or ``wandb login``) it writes to ``trackers/wandb`` in
    the run folder; ``wandb sync`` uploads this later.

    Args:
        entity: user or team; None: the default of the account.
    """

    entity: str | None = None

    requires: ClassVar[Sequence[str]] = ["wandb"]

    def open(self, run: TrackedRun, known: str | None) -> str:
        """Create the run, or continue the known one."""
        os.environ.setdefault("WANDB_SILENT", "true")  # the run's own output must stay readable
        import wandb

        folder, logins = run.folder / "trackers", Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
        server = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").split("://")[-1].split("/")[0]
        logged_in = logins.is_file() and server in logins.read_text()
        settings = wandb.Settings(console="off", silent=True, disable_git=True, disable_code=True, x_disable_stats=True)
        more = {"entity": self.entity, "dir": str(folder), "settings": settings}
        name = self._begin(wandb, run, known, logged_in, f"{folder}/wandb/offline-run", **more)
        self._run.define_metric("*", step_metric="step")
        return name

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log scalars with the metric ``step`` as the x-axis, because W&B's own step counter cannot go back."""
        self._run.log({**values, "step": step})

    def close(self, status: str, result: Mapping[str, Any], files: Sequence[Path], pictures: Sequence[Path]) -> None:
        """Upload files and pictures, write the final metrics to the summary, and end the run."""
        import wandb

        for file in files:
            if file.name != "config.yaml":  # W&B writes a file of this name, and would overwrite ours through a link
                self._run.save(str(file), base_path=str(file.parent), policy="now")
        if pictures:
            self.log({f"plots/{path.stem}": wandb.Image(str(path)) for path in pictures}, int(result.get("steps") or 0))
        self._run.summary.update({**final_metrics(result), "metric": result.get("metric"), "status": status})
        self._run.finish(exit_code=0 if status == "completed" else 1)


@dataclass
class SwanlabTracker(_AccountTracker):
    """SwanLab. Without an API key (``SWANLAB_API_KEY`` or ``swanlab login``) it writes to ``trackers/swanlab`` in the
    run folder; ``swanlab sync`` uploads this later.

    Args:
        workspace: user or organization; None: the default of the account.
    """

    workspace: str | None = None

    requires: ClassVar[Sequence[str]] = ["swanlab"]

    def open(self, run: TrackedRun, known: str | None) -> str:
        """Create the run, or continue the known one."""
        import swanlab

        folder, logged_in = run.folder / "trackers" / "swanlab", (Path.home() / ".swanlab" / ".netrc").is_file()
        folder.mkdir(exist_ok=True)
        more = {"workspace": self.workspace, "log_dir": str(folder)}
        return self._begin(swanlab, run, known, logged_in, f"{folder}/run", **more)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log scalars."""
        self._run.log(dict(values), step=step)

    def close(self, status: str, result: Mapping[str, Any], files: Sequence[Path], pictures: Sequence[Path]) -> None:
        """Upload the pictures and the final metrics, and end the run."""
        import swanlab

        final: dict[str, Any] = {f"plots/{path.stem}": swanlab.Image(str(path)) for path in pictures}
        final.update(final_metrics(result, "final/"))
        if final:
            self._run.log(final, step=int(result.get("steps") or 0))
        self._run.finish(**({} if status == "completed" else {"state": "crashed", "error": status}))
