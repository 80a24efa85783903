"""TensorBoard, MLflow, Weights & Biases and SwanLab as trackers.

A client is imported when its tracker opens a run. What it reads from environment variables of its own, such as
``WANDB_ENTITY``, is not a key here.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
import uuid
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Mapping, Sequence

from exp.trackers.base import Tracker, final_metrics

if TYPE_CHECKING:
    from exp.report.runs import Run

_INVALID_CHARS = re.compile(r"[^\w\-. /]")  # characters that MLflow refuses in names
_MAX_CHARS = 500  # characters of a value that the oldest MLflow servers accept


class TensorboardTracker(Tracker):
    """Writes event files to ``tensorboard`` in the run folder; ``--logdir`` of a sweep's folder shows all its runs."""

    requires: ClassVar[Sequence[str]] = ["tensorboard"]

    def open(self, run: Run, run_id: str | None) -> str:
        """Open a new event file; TensorBoard shows all files of a run as one.

        Returns:
            The folder of the event files.
        """
        from torch.utils.tensorboard import SummaryWriter

        folder = run.folder / "tensorboard"
        self._writer, self._keys = SummaryWriter(str(folder)), run.config
        self.address = f"tensorboard --logdir {folder}"  # the command that shows it
        return str(folder)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log scalars, without those of the test: a chart of a single point shows nothing; HPARAMS has them."""
        for name, value in values.items():
            if not name.startswith("test/"):
                self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        """Write buffered events to the disk."""
        self._writer.flush()

    def close(self, status: str, result: Mapping[str, Any], files: Sequence[Path], pictures: Sequence[Path]) -> None:
        """Add pictures and status, and configuration and final metrics for the HPARAMS tab."""
        import numpy as np
        from PIL import Image

        for picture in pictures:
            pixels = np.asarray(Image.open(picture).convert("RGB"))
            self._writer.add_image(f"plots/{picture.stem}", pixels, int(result.get("steps") or 0), dataformats="HWC")
        # TensorBoard makes a chart of each, in the order of the alphabet: these come after the curves (train, val).
        self._writer.add_hparams(self._keys, final_metrics(result, "values_at_the_end/"), run_name=".")
        self._writer.add_text("status", status)
        self._writer.close()


@dataclass
class MlflowTracker(Tracker):
    """MLflow. Runs of one sweep have the same tag ``sweep``.

    Args:
        uri: URI of a tracking server, such as ``http://host:5000``; None: ``MLFLOW_TRACKING_URI``. If neither is set,
            the database ``outputs/mlflow/mlflow.db`` is used, with files of runs beside it.
        experiment: name of the MLflow experiment; None: name of the experiment in the configuration.
    """

    uri: str | None = None
    experiment: str | None = None

    requires: ClassVar[Sequence[str]] = ["mlflow"]

    def open(self, run: Run, run_id: str | None) -> str:
        """Create a run with the configuration as its parameters, or continue the known one."""
        from mlflow import MlflowClient
        from mlflow.entities import Param
        from mlflow.exceptions import MlflowException

        self._waiting: list[Any] = []
        name, artifacts, lock = self.experiment or run.config["name"], None, None
        uri = self.uri or os.environ.get("MLFLOW_TRACKING_URI") or ""
        if not uri:
            store = Path("outputs/mlflow").absolute()
            store.mkdir(parents=True, exist_ok=True)
            uri, artifacts = f"sqlite:///{store / 'mlflow.db'}", (store / "files" / name.replace("/", "_")).as_uri()
            lock = (store / ".lock").open("w")
            fcntl.flock(lock, fcntl.LOCK_EX)  # the first client creates the tables; parallel runs must not do it twice
        with lock or nullcontext(), suppress(MlflowException):  # it exists; a parallel run may have just created it
            self._client = MlflowClient(tracking_uri=uri)
            self._client.create_experiment(name, artifact_location=artifacts)
        experiment = self._client.get_experiment_by_name(name).experiment_id
        if run_id is None:
            tags = {"sweep": run.name.rpartition("/")[0]}
            run_id = str(self._client.create_run(experiment, tags=tags, run_name=run.name).info.run_id)
            parameters = [
                Param(_INVALID_CHARS.sub("_", key), str(value)[:_MAX_CHARS]) for key, value in run.config.items()
            ]
            self._client.log_batch(run_id, params=parameters)
        else:
            self._client.update_run(run_id, status="RUNNING")
        self._id, page = run_id, f"{uri.rstrip('/')}/#/experiments/{experiment}/runs/{run_id}"
        self.address = page if artifacts is None else f"run {run_id}; mlflow ui --backend-store-uri {uri}"
        return run_id

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Buffer scalars until :meth:`flush`."""
        from mlflow.entities import Metric

        at = int(time.time() * 1000)
        self._waiting += [Metric(_INVALID_CHARS.sub("_", name), value, at, step) for name, value in values.items()]

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
        self._client.set_tag(self._id, "status", status)
        self._client.set_terminated(self._id, {"completed": "FINISHED", "failed": "FAILED"}.get(status, "KILLED"))


@dataclass
class _AccountTracker(Tracker):
    """Common part of the two trackers with user accounts and projects. Runs of one sweep are a group at the tracker.

    The client's mode is that of ``WANDB_MODE`` or ``SWANLAB_MODE``. If it is not set, it is ``online`` if there is an
    API key, else ``offline``.

    Args:
        project: name of the project; None: name of the experiment.
    """

    project: str | None = None

    def _init_client(
        self, client: Any, run: Run, run_id: str | None, logged_in: bool, offline_dir: str, **more: Any
    ) -> str:
        """Create the run or continue it; ``offline_dir`` is the path prefix of offline runs, for :attr:`address`."""
        name, prefix = run_id or uuid.uuid4().hex[:12], client.__name__.upper()
        has_key = logged_in or os.environ.get(f"{prefix}_API_KEY")
        mode = os.environ.get(f"{prefix}_MODE") or ("online" if has_key else "offline")
        project, group = (self.project or run.config["name"]).replace("/", "-"), run.name.rpartition("/")[0] or None
        options = {"name": run.name, "group": group, "config": run.config, "mode": mode, **more}
        self._run = client.init(project=project, id=name, resume="allow", **options)
        # Only an online run has a URL; SwanLab's ``url`` raises otherwise. In other modes SwanLab prints its own hint.
        by_hand = f"{client.__name__} sync {offline_dir}-*-{name}" * (mode == "offline")
        self.address = str(self._run.url) if mode == "online" else by_hand
        return name


class WandbTracker(_AccountTracker):
    """Weights & Biases. Without an API key (``WANDB_API_KEY`` or ``wandb login``) it writes to ``trackers/wandb`` in
    the run folder; ``wandb sync`` uploads this later.
    """

    requires: ClassVar[Sequence[str]] = ["wandb"]

    def open(self, run: Run, run_id: str | None) -> str:
        """Create the run, or continue the known one."""
        os.environ.setdefault("WANDB_SILENT", "true")  # the run's own output must stay readable
        import wandb

        folder, logins = run.folder / "trackers", Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
        server = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").split("://")[-1].split("/")[0]
        logged_in = logins.is_file() and server in logins.read_text()
        settings = wandb.Settings(console="off", silent=True, disable_git=True, disable_code=True, x_disable_stats=True)
        more = {"dir": str(folder), "settings": settings}
        name = self._init_client(wandb, run, run_id, logged_in, f"{folder}/wandb/offline-run", **more)
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


class SwanlabTracker(_AccountTracker):
    """SwanLab. Without an API key (``SWANLAB_API_KEY`` or ``swanlab login``) it writes to ``trackers/swanlab`` in the
    run folder; ``swanlab sync`` uploads this later.
    """

    requires: ClassVar[Sequence[str]] = ["swanlab"]

    def open(self, run: Run, run_id: str | None) -> str:
        """Create the run, or continue the known one."""
        import swanlab

        folder, logged_in = run.folder / "trackers" / "swanlab", (Path.home() / ".swanlab" / ".netrc").is_file()
        folder.mkdir(exist_ok=True)
        return self._init_client(swanlab, run, run_id, logged_in, f"{folder}/run", log_dir=str(folder))

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
