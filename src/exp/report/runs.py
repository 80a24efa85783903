"""Finds run folders and reads them, also those of failed or unfinished runs. Imports neither torch nor pandas."""

from __future__ import annotations

import glob
import math
import os
import re
import zipfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Callable, Sequence

import numpy as np

from exp.config.sources import task_class_by_name
from exp.console import printable
from exp.errors import ConfigError
from exp.runs.files import read_json, read_yaml
from exp.runs.folder import RunFolder, validation_metric

NUMBERS = ("steps", "wall_s", "samples_per_second")
"""Keys of ``result.json`` that are columns of a table of runs."""
COLUMNS = {"rank", "run", "folder", "status", "selected_by", "metric_name", "metric", "error", *NUMBERS}
"""Columns of such a table besides the metrics and the keys that differ."""
_PICTURES, _SUFFIXES = ("plots", "predictions/overlays"), (".png", ".jpg", ".jpeg")
# Keys that only affect training.
_TRAINING_KEYS = re.compile(
    r"(optim|schedule)\.|record\.chosen\.(optim|schedule)$"
    r"|(max_epochs|max_steps|batch_size|global_batch_size|accumulate|val_every|patience|min_delta)$"
)


@dataclass(frozen=True, eq=False)
class Run:
    """Content of a run folder.

    Attributes:
        folder: absolute path.
        name: short name, unique among the runs found with it.
        config: the frozen configuration by dotted keys; lists of plain values are values. Empty if it cannot be read.
            An evaluation has no training keys, because its own are defaults that did not train its weights.
        overrides: overrides that the user gave on the command line.
        result: content of ``result.json``; empty if it is missing or cannot be read.
        status: ``completed``, ``failed`` or ``preempted``; without a result ``unfinished`` if the run has started, else
            ``pending``. An unfinished run may still be running.
        env: content of ``env.json``; empty if it is missing or cannot be read.
        error: in one line why the run failed, or what is wrong with its files; None: nothing.
    """

    folder: Path
    name: str
    config: dict[str, Any]
    overrides: list[str]
    result: dict[str, Any]
    status: str
    env: dict[str, Any]
    error: str | None

    @property
    def metric_name(self) -> str | None:
        """Name of the metric that is reported and ranks runs; None if the run ended before it recorded the name."""
        name = self.result.get("metric_name")
        return None if name is None else str(name)

    @property
    def metric(self) -> float | None:
        """Value of the metric on test; None if it is missing or not finite."""
        return self.numbers.get("metric")

    @cached_property
    def numbers(self) -> dict[str, float]:
        """All finite numbers by column title: metrics, ``metric``, ``selected_by`` (on validation), :data:`NUMBERS`."""
        metrics = self.result.get("metrics")
        values = {column_title("metrics", name): metrics[name] for name in metrics} if isinstance(metrics, dict) else {}
        values.update((key, self.result.get(key)) for key in ("metric", *NUMBERS))
        values["selected_by"] = validation_metric(self.result)
        return {title: value for title, value in values.items() if is_number(value)}

    @cached_property
    def inputs(self) -> dict[str, Any]:
        """Content of ``inputs.json`` (:mod:`exp.runs.inputs`); empty: none is recorded."""
        content: dict[str, Any] = _parsed(RunFolder(self.folder).inputs, dict, [])
        return content

    @cached_property
    def samples(self) -> dict[str, Any]:
        """By name of a metric its values of the test samples, float32 (N,); empty: none are recorded."""
        try:
            with np.load(RunFolder(self.folder).test_samples) as arrays:
                return {name: arrays[name] for name in arrays.files}
        except (OSError, ValueError, zipfile.BadZipFile):  # numpy raises these for missing and damaged files
            return {}

    def records(self) -> list[dict[str, Any]]:
        """The records of ``metrics.jsonl``; empty if there is no such file."""
        return RunFolder(self.folder).records()

    def pictures(self) -> list[Path]:
        """PNG and JPEG files: first those in ``plots``, then in its subfolders, then overlays of predictions.

        ``curves.png`` is the last of its folder.
        """
        files = [path for subfolder in _PICTURES for path in (self.folder / subfolder).rglob("*")]
        paths = [path for path in files if path.suffix in _SUFFIXES]
        natural_order = sorted(paths, key=lambda path: natural_key(str(path)))
        return sorted(natural_order, key=lambda path: (
            "overlays" in path.parts, len(path.parts), path.name == "curves.png"
        ))  # fmt: skip


def find_runs(paths: Sequence[str | Path]) -> list[Run]:
    """Find the runs in and below some folders.

    Args:
        paths: run folders, folders with run folders at any depth, or globs. Below a run folder, only jobs of a sweep
            are found; parts of a run, such as the two runs of a parity check, do not count as runs.

    Returns:
        At least one run, none twice: in the order of ``paths``, within a path in natural order (2 before 10).

    Raises:
        ConfigError: a path does not exist, or no run is found.
    """
    folders: dict[Path, None] = {}
    for path in paths:
        for folder in _matches(str(path)):
            folders.update(dict.fromkeys(sorted(_below(folder), key=lambda run_folder: natural_key(str(run_folder)))))
    parent = Path(os.path.commonpath([folder.parent for folder in folders] or [Path()]))
    # Folder names may have bytes that are not UTF-8; names of runs must be printable.
    names = [os.fsencode(folder.relative_to(parent)).decode("utf-8", "replace") for folder in folders]
    runs = [read_run(folder, name) for folder, name in zip(folders, names)]
    compared = list(filter(is_compared, runs))
    if not compared:
        raise ConfigError(
            f"no run found in {', '.join(map(str, paths)) or 'no path'}: a run folder has a config.yaml beside an "
            "overrides.yaml or a result.json, and those of task=doctor and the like have nothing to compare; give a "
            "run folder, a folder of them, or a glob such as 'outputs/*/*'"
        )
    return compared


def read_run(folder: Path, name: str) -> Run:
    """Read the run in ``folder``; files that cannot be read are reported in ``error``, not raised."""
    run_folder, name = RunFolder(folder), printable(name)
    problems: list[str] = []
    config = _parsed(run_folder.config, dict, problems)
    env = _parsed(run_folder.env, dict, problems)
    overrides = _parsed(run_folder.overrides, list, problems)
    result = _parsed(run_folder.result, dict, problems)
    problems += [f"{name} was changed or deleted after the run" for name in run_folder.modified_files(result)]
    has_started = result or (run_folder.logs.is_dir() and any(run_folder.logs.iterdir()))
    return Run(
        folder=run_folder.path,
        name=name,
        config=_drop_training_keys(flatten({**config, "record": env.get("record", {})})) if config else {},
        overrides=list(map(str, overrides)),
        result=result,
        status=str(result.get("status") or "unfinished") if has_started else "pending",
        env=env,
        error=_error(result.get("error")) or "; ".join(problems) or None,
    )


def is_compared(run: Run) -> bool:
    """Whether a run has something to compare: one of ``task=doctor``, for example, has nothing."""
    return bool(getattr(task_class_by_name(str(run.config.get("task.name"))), "has_comparable_result", True))


def is_number(value: Any) -> bool:
    """Whether a value is a finite number (a boolean is not)."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def column_title(kind: str, name: str) -> str:
    """A unique column title for a metric (``kind`` is ``metrics``) or for a key (``kind`` is ``config``)."""
    return f"{kind}.{name}" if name in COLUMNS else name


def natural_key(text: str) -> list[Any]:
    """A sort key for natural order, in which 2 comes before 10."""
    parts = re.split(r"(\d+)", text)
    return [int(part) if number % 2 else part.lower() for number, part in enumerate(parts)]


def _matches(path: str) -> list[Path]:
    """The folders that a path or a glob matches."""
    path = os.path.expanduser(path)  # noqa: PTH111 - a pattern, not a path
    matches = [path] if Path(path).is_dir() else sorted(glob.glob(path, recursive=True), key=natural_key)  # noqa: PTH207
    folders = [Path(match).resolve() for match in matches if Path(match).is_dir()]
    if not folders:
        raise ConfigError(
            f"{path} is not a folder, and matches none; give a run folder, a folder of them, or a glob such as "
            "'outputs/*/*'"
        )
    return folders


def _below(folder: Path) -> list[Path]:
    """The run folders in and below ``folder``; symbolic links are not followed."""
    folders = [path.parent for path in folder.rglob("config.yaml")]
    files = ("overrides.yaml", "result.json")
    run_folders = {path for path in folders if any((path / name).is_file() for name in files)}

    def is_part(run: Path) -> bool:
        # A sweep may have the folder of an earlier run; its jobs are numbered folders in it.
        above = run_folders & set(run.parents) - ({run.parent} if run.name.isdigit() else set())
        return bool(above) or any(part[0] == "." for part in run.relative_to(folder).parts)

    return [run for run in run_folders if not is_part(run)]


def _drop_training_keys(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration without training keys, if the run evaluates weights of another run."""
    evaluates = config.get("record.trained_in") is not None
    return {key: value for key, value in config.items() if not (evaluates and _TRAINING_KEYS.match(key))}


def flatten(values: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings, and lists of mappings, to dotted keys; other lists and empty values stay values."""
    if isinstance(values, list) and values and all(isinstance(element, dict) for element in values):
        values = dict(enumerate(values))
    if not isinstance(values, dict) or not values:
        return {prefix: values}
    parts = [flatten(value, f"{prefix}.{key}" if prefix else str(key)) for key, value in values.items()]
    return {key: value for part in parts for key, value in part.items()}


def _error(error: Any) -> str:
    """The error of a result in one line, such as ``rank 3: RunError: loss is nan``; empty: none."""
    if not isinstance(error, dict):
        return ""
    rank = "" if error.get("rank") is None else f"rank {error['rank']}"
    return ": ".join(filter(None, [rank, str(error.get("type") or ""), _first_line(error.get("message") or "")]))


def _first_line(text: Any) -> str:
    return next((line.strip() for line in str(text).splitlines() if line.strip()), "")


def _parsed(path: Path, kind: Callable[[], Any], problems: list[str]) -> Any:
    """The content of a YAML or JSON file, or an empty ``kind`` if it is missing or damaged; damage adds a problem."""
    value = None
    try:
        value = read_json(path) if path.suffix == ".json" else read_yaml(path)
    except FileNotFoundError:
        pass
    except (ConfigError, OSError) as error:  # name instead of path: tables have little room
        problems.append(f"{path.name} cannot be read: {_first_line(error)}".replace(str(path), path.name))
    if value is not None and not isinstance(value, type(kind())):
        problems.append(f"{path.name} does not have the content that a run writes")
    return _printable(value) if isinstance(value, type(kind())) else kind()


def _printable(value: Any) -> Any:
    """The content of a file, perhaps a stranger's, without control characters in its texts."""
    if isinstance(value, dict):
        return {_printable(key): _printable(item) for key, item in value.items()}
    if isinstance(value, list):
        return list(map(_printable, value))
    return printable(value) if isinstance(value, str) else value
