"""Runs from Python, as in a notebook: ``exp.open_run(path)``, ``exp.open_sweep(path)``, ``exp.run([...])``.

Imports torch and pandas only when they are needed.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Mapping, Sequence

from exp.config.check import has_weights
from exp.config.compose import load
from exp.config.resolve import class_names, create, mark_untrusted, trust_packages
from exp.errors import ConfigError, RunError
from exp.runs.files import read_json
from exp.runs.folder import RunFolder
from exp.runs.job import NOTE_VARIABLE
from exp.worker.processes import START

if TYPE_CHECKING:
    import pandas as pd
    from torch import nn

    from exp.config.schema import ExpConfig


class OpenRun:
    """A run, finished or not, as its folder records it.

    Attributes:
        path: absolute path of the run folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def __repr__(self) -> str:
        return f"<run {self.path}: {self.result.get('status', 'unfinished')}>"

    @cached_property
    def config(self) -> ExpConfig:
        """The frozen configuration, typed, with interpolations resolved; for example ``run.config.optim.lr``.

        Raises:
            ConfigError: ``config.yaml`` is not the configuration of a run.
        """
        return load(RunFolder(self.path).config)

    @cached_property
    def result(self) -> dict[str, Any]:
        """The content of ``result.json``; empty if the run has not ended."""
        return read_json(RunFolder(self.path).result) or {}

    @property
    def metrics(self) -> pd.DataFrame:
        """A row for each record of ``metrics.jsonl``: ``split`` (train, val, test), ``step``, and the measured values.

        A value that a record does not have is NaN. The file is read at each access, since the run may still be running.
        """
        import pandas as pd

        # Not pandas.read_json, which rounds numbers, and parses columns with certain names as dates.
        rows = [{key: math.nan if value is None else value for key, value in record.items()}
                for record in RunFolder(self.path).records()]  # fmt: skip
        return pd.DataFrame(rows) if rows else pd.DataFrame(columns=["split", "step"])

    @property
    def tables(self) -> Mapping[str, pd.DataFrame]:
        """The CSV files of the run, by their path relative to the run folder; read at each access.

        These are detailed metrics, and what the data's own predictions write.
        """
        import pandas as pd

        files = sorted(self.path.rglob("*.csv"))
        return {
            file.relative_to(self.path).as_posix(): pd.read_csv(file, float_precision="round_trip") for file in files
        }

    def model(self, device: str = "cpu") -> nn.Module:
        """The model with the tested weights, in eval mode.

        This opens the data set: some arguments of the model, such as the number of classes, depend on its files.

        Args:
            device: a torch device, such as ``cpu`` or ``<device type>:0``.

        Raises:
            ExpError: the data are missing, there is no checkpoint, or the checkpoint does not fit the model.
        """
        from mmengine.model import BaseModel

        from exp.data.base import Data
        from exp.engine.weights import load_weights, read_weights
        from exp.hub import with_commit

        mark_untrusted(self.config)
        # Packages that are already imported in this process count as chosen by the user.
        trust_packages(
            [top for _, name in class_names(self.config) for top in [name.partition(".")[0]] if top in sys.modules]
        )
        # The folder of an evaluation has no checkpoint: it has used the weights of init_from.
        source = self.path if RunFolder(self.path).has_checkpoint() else Path(with_commit(self.config) or self.path)
        weights = read_weights(source, self.config.checkpoint.trusted) if has_weights(self.config) else None
        data = create(self.config.data, Data, "data")
        if weights is not None and weights.data is not None:
            data.load_state_dict(weights.data)
        model: nn.Module = create(self.config.model, BaseModel, "model", **data.model_arguments())
        if weights is not None:
            load_weights(model, weights, self.config, exact=True)
        return model.to(device).eval()

    def predict(self, *overrides: str) -> OpenRun:
        """Run ``task=predict`` with this run's weights, in a run folder of its own, and return the new run.

        Args:
            *overrides: as on the command line, such as ``"task.input=new.csv"``, ``"backend=cpu"``.

        Raises:
            RunError: the command failed. The message has the first line of its error; its output was printed before.
        """
        predicted: OpenRun = run(["task=predict", f"init_from={self.path}", *overrides])
        return predicted


def open_run(path: str | os.PathLike[str]) -> OpenRun:
    """Open a run folder.

    Args:
        path: a folder with a ``config.yaml``.

    Raises:
        ConfigError: the path is not a run folder.
    """
    folder = Path(path).expanduser().absolute()
    if not RunFolder(folder).config.is_file():
        raise ConfigError(f"{path} is no run folder: it has no config.yaml", "of a sweep's folder use exp.open_sweep")
    return OpenRun(folder)


def open_sweep(path: str | os.PathLike[str], average_seeds: bool = False) -> pd.DataFrame:
    """The runs of a sweep, or of any folder of runs, the best first.

    Args:
        path: the sweep's folder, or a glob of run folders.
        average_seeds: return one row per configuration, averaged over its seeds: ``n`` (number of seeds),
            ``metric_mean`` and ``metric_std`` (sample standard deviation), the same two for each metric under its own
            name, and ``folders``.

    Returns:
        One row per run: the keys that differ between the runs, status, metric, and the other columns of ``sweep.json``.
        The column ``folder`` can be passed to :func:`open_run`.

    Raises:
        ConfigError: there are no runs.
    """
    return _table([Path(path).expanduser()], average_seeds)


def run(overrides: Sequence[str] = ()) -> Any:
    """Run ``python -m exp <overrides>`` in a process of its own, print its output, and wait for its end.

    Args:
        overrides: such as ``["experiment=mine", "backend=cpu"]``.

    Returns:
        The run, an :class:`OpenRun`. For a sweep (``-m``) and for ``task=report`` a DataFrame of the runs, as
        :func:`open_sweep` returns it; if no job of a sweep has a result, as with ``task=doctor``, a list of
        :class:`OpenRun`. None if the command leaves no run to open, such as ``task=estimate``, ``--help`` and
        ``--cfg job``.

    Raises:
        ConfigError: ``overrides`` is a string instead of a list, or an element is not a string.
        RunError: the exit code is not 0. The message has the first line of the error; the output was printed before.
    """
    arguments = list(overrides)
    if isinstance(overrides, str) or not all(isinstance(override, str) for override in arguments):
        raise ConfigError(f"exp.run takes a list of overrides, strings as on the command line, and not {overrides!r}")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "note.json")
        code = _run_command([sys.executable, "-c", START, "exp", *arguments], {**os.environ, NOTE_VARIABLE: str(file)})
        note = read_json(file) or {"runs": [], "error": None}
        if code != 0:
            reason = f": {note['error']}" if note["error"] else ""
            raise RunError(f"python -m exp {' '.join(arguments)} ended with code {code}{reason}")
        runs = [open_run(path) for path in note["runs"]]
    if len(runs) < 2 and not {"-m", "--multirun", "task=report"} & {*arguments}:
        return runs[0] if runs else None
    try:
        return _table([run.path for run in runs]) if runs else None
    except ConfigError:  # no run has a result
        return runs


def _run_command(command: list[str], environment: dict[str, str]) -> int:
    """Run a command, print its output by Python, so that a notebook shows it, too, and return the exit code."""
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
    process: Any = subprocess.Popen(command, env=environment, **pipes)
    try:
        for line in process.stdout:
            sys.stdout.write(line)
        code: int = process.wait()
        return code
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()


def _table(paths: Sequence[str | Path], average_seeds: bool = False) -> pd.DataFrame:
    import pandas as pd

    from exp.report.runs import find_runs
    from exp.report.tables import run_rows, seed_rows

    runs = find_runs(paths)
    return pd.DataFrame(seed_rows(runs) if average_seeds else run_rows(runs))
