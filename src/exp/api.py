"""Runs from Python, as in a notebook: ``exp.open_run(path)``, ``exp.open_sweep(path)``, ``exp.run([...])``.

Imports neither torch nor pandas before they are needed.
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

from exp.cli import NOTE_VARIABLE
from exp.config.check import has_weights
from exp.config.compose import load
from exp.config.resolve import allow, create, distrust, names_in
from exp.errors import ConfigError, RunError
from exp.runs.files import read_json
from exp.runs.folder import RunFolder

if TYPE_CHECKING:
    import pandas as pd
    from torch import nn

    from exp.config.schema import ExpConfig

__all__ = ["OpenRun", "open_run", "open_sweep", "run"]


class OpenRun:
    """A run that has been made, as its folder tells of it.

    Attributes:
        path: the run folder, absolute.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def __repr__(self) -> str:
        metric = (
            "" if self.result.get("metric") is None else f", {self.result['metric_name']} {self.result['metric']:.4g}"
        )
        return f"<run {self.path}: {self.result.get('status', 'unfinished')}{metric}>"

    @cached_property
    def config(self) -> ExpConfig:
        """The frozen configuration, typed, with its interpolations resolved: ``run.config.optim.lr``.

        Raises:
            ConfigError: ``config.yaml`` is not what a run leaves.
        """
        return load(RunFolder(self.path).config)

    @cached_property
    def result(self) -> dict[str, Any]:
        """``result.json``; empty where the run has not ended."""
        return read_json(RunFolder(self.path).result) or {}

    @property
    def metrics(self) -> pd.DataFrame:
        """``metrics.jsonl`` by row: ``split`` (train, val, test), ``step``, and what was measured, else nan.

        Read anew each time: the run may be going on.
        """
        import pandas as pd

        # Not pandas' reader of JSON, which rounds, and takes columns for dates by their names.
        rows = [{key: math.nan if value is None else value for key, value in record.items()}
                for record in RunFolder(self.path).records()]  # fmt: skip
        return pd.DataFrame(rows) if rows else pd.DataFrame(columns=["split", "step"])

    @property
    def tables(self) -> Mapping[str, pd.DataFrame]:
        """The CSV files that the run has written, by their path below the run folder: forecasts with their intervals,
        predictions of classes, metrics in detail; read anew each time.
        """
        import pandas as pd

        listed = [self.path / file for file in self.result.get("files") or () if file.endswith(".csv")]
        found = [file for file in [*listed, *sorted(self.path.glob("*.csv"))] if file.is_file()]
        return {
            file.relative_to(self.path).as_posix(): pd.read_csv(file, float_precision="round_trip")
            for file in dict.fromkeys(found)
        }

    def model(self, device: str = "cpu") -> nn.Module:
        """The model with the weights that were tested, in eval mode.

        The data set is opened for what only its files can tell, such as the number of classes.

        Args:
            device: of torch.

        Raises:
            ExpError: the data are not there, there is no checkpoint, or it does not fit.
        """
        from mmengine.model import BaseModel

        from exp.data.base import Data
        from exp.engine.building import fit_weights, read_weights
        from exp.hub import pinned

        distrust(self.config)
        # In Python the user has chosen what he has imported.
        allow([top for _, name in names_in(self.config) for top in [name.partition(".")[0]] if top in sys.modules])
        # An evaluation has none of its own.
        source = self.path if RunFolder(self.path).has_checkpoint() else Path(pinned(self.config) or self.path)
        weights = read_weights(source) if has_weights(self.config) else None
        data = create(self.config.data, Data, "data")
        if weights is not None and weights.data is not None:
            data.load_state_dict(weights.data)
        model: nn.Module = create(self.config.model, BaseModel, "model", **data.model_arguments())
        if weights is not None:
            fit_weights(model, weights, self.config, as_it_is=True)
        return model.to(device).eval()

    def predict(self, *overrides: str | Sequence[str]) -> OpenRun:
        """``task=predict`` with this run's weights, in a run folder of its own.

        Args:
            *overrides: as on the command line: ``"task.input=new.csv"``, ``"backend=cpu"``; or a list of such.

        Raises:
            RunError: it failed, with the first line of why; all that it said stands above.
        """
        given = [each for some in overrides for each in ([some] if isinstance(some, str) else some)]
        predicted: OpenRun = run(["task=predict", f"init_from={self.path}", *given])
        return predicted


def open_run(path: str | os.PathLike[str]) -> OpenRun:
    """A run folder.

    Args:
        path: has a ``config.yaml``.

    Raises:
        ConfigError: it is none.
    """
    folder = Path(path).expanduser().absolute()
    if not RunFolder(folder).config.is_file():
        raise ConfigError(f"{path} is no run folder: it has no config.yaml; of a sweep's folder use exp.open_sweep")
    return OpenRun(folder)


def open_sweep(path: str | os.PathLike[str], average_seeds: bool = False) -> pd.DataFrame:
    """The runs of a sweep, or of any folder of runs, the best first.

    Args:
        path: of the sweep's folder, or a glob of run folders.
        average_seeds: a row for each configuration instead, whatever its seeds: ``n`` of them, ``metric_mean`` and
            ``metric_std`` (sample standard deviation), the same for each metric under its own name, and ``folders``.

    Returns:
        A row for each: the keys that differ, status, metric, and what else ``sweep.json`` has; ``folder`` is for
        :func:`open_run`.

    Raises:
        ConfigError: there is no run.
    """
    return _table([Path(path).expanduser()], average_seeds)


def run(overrides: Sequence[str] = ()) -> Any:
    """Start what ``python -m exp <overrides>`` starts, in a process of its own, and wait for its end.

    Args:
        overrides: such as ``["experiment=mine", "backend=cpu"]``.

    Returns:
        The run, an :class:`OpenRun`. Of a sweep (``-m``) and of ``task=report`` the runs, as the DataFrame that
        :func:`open_sweep` gives of them; a list of :class:`OpenRun` where jobs of a sweep leave no result, as those of
        ``task=doctor``. None where there is no run to be opened: of ``task=estimate``, ``--help``,
        ``--cfg job`` and the like, which print what they have to say.

    Raises:
        ConfigError: ``overrides`` is one string, or has something that is none.
        RunError: its exit code is not 0, with the first line of why; all that it said stands above.
    """
    arguments = list(overrides)
    if isinstance(overrides, str) or not all(isinstance(each, str) for each in arguments):
        raise ConfigError(f"exp.run takes a list of overrides, strings as on the command line, and not {overrides!r}")
    with tempfile.TemporaryDirectory() as folder:
        note = Path(folder, "runs.json")
        code, reason = _shown([sys.executable, "-m", "exp", *arguments], {**os.environ, NOTE_VARIABLE: str(note)})
        if code != 0:
            raise RunError(f"python -m exp {' '.join(arguments)} ended with code {code}{reason}")
        left = read_json(note) or {"runs": [], "several": False}  # none: it has ended by itself, as --help does
    runs = [open_run(path) for path in left["runs"]]
    if not left["several"] and len(runs) < 2:
        return runs[0] if runs else None
    try:
        return _table([run.path for run in runs]) if runs else None
    except ConfigError:  # there is no result in any of them
        return runs


def _shown(command: list[str], environment: dict[str, str]) -> tuple[int, str]:
    """Run a command, its output wherever a notebook shows what is printed; the exit code, and ``: <its error>``."""
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    reason = ""
    try:
        for line in process.stdout:
            sys.stdout.write(line)
            if not reason and line.startswith("error: "):
                reason = f": {line[len('error: ') :].strip()}"
        return process.wait(), reason
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
