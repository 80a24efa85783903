"""Experiment trackers: TensorBoard, MLflow, Weights & Biases, SwanLab, and the interface of others.

Rank 0 sends metrics to each tracker in a separate thread (:class:`Reporter`), so no training step waits for a server.
``task=track`` sends a finished run to a tracker. The module imports neither torch nor a client: a client is imported
when its tracker opens a run. What a client reads from environment variables of its own, such as ``WANDB_ENTITY``, is
not a key here.
"""

from __future__ import annotations

import abc
import fcntl
import importlib.util
import logging
import os
import re
import threading
import time
import uuid
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Callable, ClassVar, Iterator, Mapping, Sequence

from exp.config.resolve import create
from exp.errors import ConfigError, UnavailableError
from exp.report.runs import Run, is_number, read_run
from exp.runs.files import read_json, write_json

if TYPE_CHECKING:
    from exp.config.schema import LoggerConfig
    from exp.runs.folder import RunFolder

__all__ = ["Reporter", "Tracker", "check", "final_metrics", "start", "upload_finished"]

logger = logging.getLogger(__name__)

_INVALID_CHARS = re.compile(r"[^\w\-. /]")  # characters that MLflow refuses in names
_MAX_CHARS = 500  # characters of a value that the oldest MLflow servers accept
_FILES = ("config.yaml", "overrides.yaml", "env.json", "result.json")


class Tracker(abc.ABC):
    """Interface of a tracker; an instance handles one run.

    A configuration names the class in ``logger.trackers.<name>`` by ``_target_``; the other keys are arguments of the
    constructor. All methods are called in one thread of rank 0. If a method raises, the tracker is switched off for the
    rest of the run with a warning, and the run continues.

    Attributes:
        address: URL of the run, or the command that shows it; set by :meth:`open`.
        requires: names of packages that must be importable; checked before the run starts.
    """

    address: str = ""
    requires: ClassVar[Sequence[str]] = ()

    @abc.abstractmethod
    def open(self, run: Run, run_id: str | None) -> str:
        """Create the run at the tracker, or continue it.

        Args:
            run: name (the run folder's; for a job of a sweep ``<sweep folder>/<run folder>``), folder, and frozen
                configuration by dotted key, whose values are numbers, booleans or text.
            run_id: what this method returned earlier for the same run folder, if the run was resumed or restarted;
                None: the run is new.

        Returns:
            The tracker's id of the run.
        """

    @abc.abstractmethod
    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log scalars.

        Args:
            values: values by name, such as ``train/loss``, ``val/mse``, ``test/mse``; may be NaN or infinite.
            step: number of completed optimizer steps.
        """

    def flush(self) -> None:
        """Send values that :meth:`log` has buffered; called when the queue is empty."""

    @abc.abstractmethod
    def close(self, status: str, result: Mapping[str, Any], files: Sequence[Path], pictures: Sequence[Path]) -> None:
        """End the run at the tracker.

        Args:
            status: ``completed``, ``failed`` or ``preempted``; ``killed`` if the run left no result.
            result: content of ``result.json``, or empty.
            files: text files of the run folder: configuration, environment, result.
            pictures: PNG files of ``plots/``.
        """


def final_metrics(result: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The metrics of ``result.json`` that have a value (finite ones), by name with ``prefix``."""
    return {f"{prefix}{name}": value for name, value in (result.get("metrics") or {}).items() if value is not None}


class Reporter:
    """Connection of one run to one tracker.

    The tracker works in a thread that reads a queue, so the training never waits for it. If the tracker raises, it is
    switched off.

    Args:
        name: name of the tracker in ``logger.trackers``.
        tracker: the tracker.
        folder: the run folder.
        warn: function that prints a line for the user.

    Attributes:
        state: content of ``trackers/<name>.json`` in the run folder: ``run_id``, the tracker's id of the run (None:
            the tracker has no such run yet); ``address`` (see :class:`Tracker`); ``sent``, the last step that the
            tracker has received, by split; ``closed``, whether the run has ended at the tracker.
    """

    def __init__(self, name: str, tracker: Tracker, folder: RunFolder, warn: Callable[[str], object]) -> None:
        self.name, self._tracker, self._run, self._warn = name, tracker, _run_info(folder), warn
        self._file = folder.path / "trackers" / f"{name}.json"
        self.state = {"run_id": None, "address": "", "sent": {}, "closed": False, **(read_json(self._file) or {})}
        self._queue: SimpleQueue[tuple[Mapping[str, float], int] | None] = SimpleQueue()
        self._end: tuple[str, Mapping[str, Any]] = ("killed", {})
        self._thread = threading.Thread(target=self._work, name=f"tracker-{name}", daemon=True)

    def start(self) -> Reporter:
        """Start the thread; returns the reporter itself."""
        self.state["closed"] = False
        self._thread.start()
        return self

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Put scalars into the queue; returns at once."""
        self._queue.put((dict(values), step))

    def close(self, status: str, result: Mapping[str, Any], patience_s: float) -> bool:
        """End the run at the tracker, and wait for it at most ``patience_s`` seconds.

        Returns:
            Whether the tracker has received everything in time.
        """
        self._end = (status, result)
        self._queue.put(None)
        self._thread.join(patience_s)
        if self._thread.is_alive():
            self._switch_off(f"no answer for {patience_s:g} s")
        return bool(self.state["closed"])

    def _work(self) -> None:
        tracker, folder, sent = self._tracker, self._run.folder, dict(self.state["sent"])
        try:
            self._file.parent.mkdir(exist_ok=True)
            run_id = tracker.open(self._run, self.state["run_id"])
            self._write(run_id=run_id, address=tracker.address)
            for values, step in iter(self._queue.get, None):
                tracker.log(values, step)
                sent.update({name.partition("/")[0]: step for name in values})
                if self._queue.empty():
                    tracker.flush()
                    self._write(sent=dict(sent))
            tracker.flush()
            files = [path for path in map(folder.joinpath, _FILES) if path.is_file()]
            tracker.close(*self._end, files, sorted((folder / "plots").rglob("*.png")))
            self._write(sent=sent, closed=True)
        except Exception as error:
            logger.warning("tracker %s", self.name, exc_info=True)
            self._switch_off(f"{type(error).__name__}: {' '.join(str(error).split())}"[:300])

    def _write(self, **changed: Any) -> None:
        self.state.update(changed)
        write_json(self._file, self.state)

    def _switch_off(self, why: str) -> None:
        self._warn(
            f"{self.name} is switched off for this run: {why}\n"
            f"  to send it the rest later: python -m exp task=track logger={self.name} run={self._run.folder}"
        )


def check(chosen: LoggerConfig) -> None:
    """Check that the packages of the logger are installed, and that its trackers can be created, before a run starts.

    Raises:
        ConfigError: a class is not a :class:`Tracker`, or does not accept its arguments.
        UnavailableError: a required package is not installed.
    """
    needed = [*chosen.requires, *(package for _, tracker in _trackers(chosen) for package in tracker.requires)]
    for package in needed:
        if importlib.util.find_spec(package) is None:
            raise UnavailableError(f"the logger needs {package}, which is not installed: pip install {package}")


def start(chosen: LoggerConfig, folder: RunFolder, warn: Callable[[str], object]) -> list[Reporter]:
    """Connect a run to each of its trackers.

    Args:
        chosen: configuration of the trackers.
        folder: the run folder.
        warn: function that prints a line for the user.

    Returns:
        The reporters, all started.
    """
    return [Reporter(name, tracker, folder, warn).start() for name, tracker in _trackers(chosen)]


def upload_finished(chosen: LoggerConfig, folder: RunFolder, warn: Callable[[str], object]) -> list[Reporter]:
    """Send a finished run to trackers, except what they have received already.

    Args:
        chosen: configuration of the trackers.
        folder: the run folder.
        warn: function that prints a line for the user.

    Returns:
        The reporters of the trackers that had not received everything; all are closed.
    """
    records, result = folder.records(), read_json(folder.result) or {}
    reporters = []
    for name, tracker in _trackers(chosen):
        reporter = Reporter(name, tracker, folder, warn)
        sent = reporter.state["sent"]
        rest = [record for record in records if record["step"] > sent.get(record["split"], -1)]
        if rest or not reporter.state["closed"]:
            reporters.append(reporter.start())
            for record in rest:
                reporter.log(_scalars(record), record["step"])
            reporter.close(result.get("status", "killed"), result, chosen.patience_s)
    return reporters


def _trackers(chosen: LoggerConfig) -> Iterator[tuple[str, Tracker]]:
    """Create the configured trackers; yields name and tracker."""
    for name, tracker in chosen.trackers.items():
        key = f"logger.trackers.{name}"
        if not isinstance(tracker, Mapping) or "_target_" not in tracker:
            raise ConfigError(f"{key} must be {{_target_: <path of a class>, <arguments>}}", f"logger={name} has both")
        yield name, create(tracker, Tracker, key)


def _run_info(folder: RunFolder) -> Run:
    path, sweep = folder.path, folder.path.parent
    run = read_run(path, f"{sweep.name}/{path.name}" if (sweep / "multirun.yaml").is_file() else path.name)
    keys = {key: value if isinstance(value, (bool, int, float, str)) else str(value)
            for key, value in run.config.items() if not key.startswith("record.")}  # fmt: skip
    return replace(run, config=keys)


def _scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a record of ``metrics.jsonl`` by ``<split>/<name>``."""
    scalars = {name: float(value) for name, value in record.items() if is_number(value)}
    return {f"{record['split']}/{name}": value for name, value in scalars.items() if name not in ("step", "epoch")}


# -- clients -----------------------------------------------------------------------------------------------------------


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
        """Log scalars."""
        for name, value in values.items():
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
        self._writer.add_hparams(self._keys, final_metrics(result, "final/"), run_name=".")
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
