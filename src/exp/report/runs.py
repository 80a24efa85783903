"""Run folders: found on the disk, and read whatever became of the run. Imports neither torch nor pandas."""

from __future__ import annotations

import glob
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Sequence

import yaml

from exp.config.compose import task_named
from exp.errors import ConfigError, RunError
from exp.runs.files import read_json
from exp.runs.folder import RunFolder, selecting_value

__all__ = ["Run", "find_runs", "is_number", "natural", "read_run"]

# libyaml's loader is some ten times as fast, and not in every build of PyYAML.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_PARTS_OF_A_RUN = {"checkpoints", "logs", "plots", "tensorboard", "trackers"}
_PICTURES, _SUFFIXES = ("plots", "predictions/overlays"), (".png", ".jpg", ".jpeg")
# Keys that only a training uses.
_OF_TRAINING = re.compile(
    r"(optim|schedule)\.|record\.chosen\.(optim|schedule)$"
    r"|(max_epochs|max_steps|batch_size|global_batch_size|accumulate|val_every|patience|min_delta)$"
)


@dataclass(frozen=True, eq=False)
class Run:
    """What a run folder holds.

    Attributes:
        folder: absolute.
        name: short, and unique among the runs it was found with.
        config: the frozen configuration by dotted keys; lists are values. Empty where it cannot be read. An evaluation
            has no keys of training: its own are defaults, not those that its weights were trained with.
        overrides: what the user gave on the command line.
        result: ``result.json``; empty where there is none, or where it cannot be read.
        status: ``completed``, ``failed``, ``preempted``; ``unfinished`` or ``pending`` for a run without a result that
            has or has not begun. An unfinished run may still be going on: its folder cannot tell.
        error: why the run failed, else what is wrong with its files, in one line; None: nothing.
    """

    folder: Path
    name: str
    config: dict[str, Any]
    overrides: list[str]
    result: dict[str, Any]
    status: str
    error: str | None

    @property
    def metric_name(self) -> str | None:
        """The metric that is reported, and that runs are chosen by; None where the run has not come to say."""
        name = self.result.get("metric_name")
        return None if name is None else str(name)

    @property
    def metric(self) -> float | None:
        """Its value on test; None where there is none, or none that is finite."""
        return self.number("metric")

    @property
    def selected_by(self) -> float | None:
        """The same metric on validation, by which runs are ranked; None: the run has none."""
        value = selecting_value(self.result)
        return value if is_number(value) else None

    @property
    def metrics(self) -> dict[str, float]:
        """All metrics that are finite numbers, by name."""
        found = self.result.get("metrics")
        pairs = found.items() if isinstance(found, dict) else ()
        return {str(name): value for name, value in pairs if is_number(value)}

    def number(self, key: str) -> float | None:
        """A number of the result, such as ``wall_s``, ``steps`` or ``samples_per_second``; None: it has none."""
        value: Any = self.result.get(key)
        return value if is_number(value) else None

    def records(self) -> list[dict[str, Any]]:
        """The records of ``metrics.jsonl``; none where there is no such file."""
        return RunFolder(self.folder).records()

    def pictures(self) -> list[Path]:
        """The PNG and JPEG files below ``plots``, those nearest to it first and curves last, then overlays."""
        found = [path for place in _PICTURES for path in (self.folder / place).rglob("*") if path.suffix in _SUFFIXES]
        natural_order = sorted(found, key=lambda path: natural(str(path)))
        return sorted(natural_order, key=lambda at: ("overlays" in at.parts, len(at.parts), at.name == "curves.png"))


def find_runs(paths: Sequence[str | Path]) -> list[Run]:
    """The runs in and below some folders.

    Args:
        paths: each a run folder, a folder that has run folders at any depth below it, or a glob. Below a run folder
            only jobs of a sweep into the same folder are looked for; parts of a run, such as the two of a parity check,
            are no runs of their own.

    Returns:
        At least one: by the order of ``paths``, within each in natural order (2 before 10), none twice.

    Raises:
        ConfigError: a path does not exist, or there is no run in any of them.
    """
    folders: dict[Path, None] = {}
    for path in paths:
        for folder in _matches(str(path)):
            folders.update(dict.fromkeys(sorted(_below(folder), key=lambda place: natural(str(place)))))
    parent = Path(os.path.commonpath([folder.parent for folder in folders] or [Path()]))
    # Names of folders may be any bytes; those of runs can be printed.
    names = [os.fsencode(folder.relative_to(parent)).decode("utf-8", "replace") for folder in folders]
    runs = [read_run(folder, name) for folder, name in zip(folders, names)]
    compared = [run for run in runs if getattr(task_named(str(run.config.get("task.name"))), "compared", True)]
    if not compared:
        raise ConfigError(
            f"no run found in {', '.join(map(str, paths)) or 'no path'}: a run folder has a config.yaml beside an "
            "overrides.yaml or a result.json, and those of task=doctor and the like have nothing to compare; give a "
            "run folder, a folder of them, or a glob such as 'outputs/*/*'"
        )
    return compared


def read_run(folder: Path, name: str) -> Run:
    """The run in ``folder``. Raises nothing: ``error`` names what cannot be read."""
    place = RunFolder(folder)
    problems: list[str] = []
    config = _parsed(place.config, dict, problems)
    overrides = _parsed(place.overrides, list, problems)
    result = _parsed(place.result, dict, problems)
    problems += [f"{name} is not as it was written" for name in place.altered(result)]
    begun = result or (place.logs.is_dir() and any(place.logs.iterdir()))
    return Run(
        folder=place.path,
        name=name,
        config=_as_used(_flattened(config)) if config else {},
        overrides=list(map(str, overrides)),
        result=result,
        status=str(result.get("status") or "unfinished") if begun else "pending",
        error=_error(result.get("error")) or "; ".join(problems) or None,
    )


def is_number(value: Any) -> bool:
    """Whether a value that a file holds is a finite number, and no truth value."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def natural(text: str) -> list[Any]:
    """A sort key for which 2 comes before 10."""
    parts = re.split(r"(\d+)", text)
    return [int(part) if number % 2 else part.lower() for number, part in enumerate(parts)]


def _is_run_folder(path: Path) -> bool:
    """Whether a run was written there: its configuration, and how it came about or what became of it."""
    folder = RunFolder(path)
    return folder.config.is_file() and (
        folder.overrides.is_file() or folder.result.is_file() or folder.env.is_file() or folder.logs.is_dir()
    )


def _matches(path: str) -> list[Path]:
    """The folders that a path or a glob stands for."""
    path = os.path.expanduser(path)  # noqa: PTH111 - a pattern, not a path
    found = [path] if Path(path).is_dir() else sorted(glob.glob(path, recursive=True), key=natural)  # noqa: PTH207
    folders = [Path(each).resolve() for each in found if Path(each).is_dir()]
    if not folders:
        raise ConfigError(
            f"{path} is no folder, and matches none; give a run folder, a folder of them, or a glob such as "
            "'outputs/*/*'"
        )
    return folders


def _below(folder: Path) -> list[Path]:
    """The run folders in and below one; links are not followed."""
    found = {path.parent for path in folder.rglob("config.yaml") if _is_run_folder(path.parent)}

    def is_part(run: Path, above: Path) -> bool:
        # Hydra numbers the jobs of a sweep, and notes the sweep in this file.
        name = run.relative_to(above).parts[0]
        return name in _PARTS_OF_A_RUN or not (name.isdigit() or (above / "multirun.yaml").is_file())

    hidden = {run for run in found if any(part[0] == "." for part in run.relative_to(folder).parts)}
    return [run for run in found - hidden if not any(is_part(run, above) for above in found & set(run.parents))]


def _as_used(config: dict[str, Any]) -> dict[str, Any]:
    """Without the keys of training, where the run used the weights of another one."""
    evaluates = config.get("record.trained_in") is not None
    return {key: value for key, value in config.items() if not (evaluates and _OF_TRAINING.match(key))}


def _flattened(values: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings, and lists of them, as one, with dotted keys; other lists, and what is empty, stay values."""
    if isinstance(values, list) and values and all(isinstance(each, dict) for each in values):
        values = dict(enumerate(values))
    if not isinstance(values, dict) or not values:
        return {prefix: values}
    parts = [_flattened(value, f"{prefix}.{key}" if prefix else str(key)) for key, value in values.items()]
    return {key: value for part in parts for key, value in part.items()}


def _error(error: Any) -> str:
    """The error of a result in one line: ``rank 3: RunError: loss is nan``."""
    if not isinstance(error, dict):
        return ""
    rank = "" if error.get("rank") is None else f"rank {error['rank']}"
    return ": ".join(filter(None, [rank, str(error.get("type") or ""), _first_line(error.get("message") or "")]))


def _first_line(text: Any) -> str:
    return next((line.strip() for line in str(text).splitlines() if line.strip()), "")


def _parsed(path: Path, kind: Callable[[], Any], problems: list[str]) -> Any:
    """The content of a file, an empty ``kind`` where it has none; what is wrong with it becomes a problem."""
    value = None
    try:
        value = read_json(path) if path.suffix == ".json" else yaml.load(path.read_text("utf-8"), _LOADER)  # noqa: S506
    except FileNotFoundError:
        pass
    except (RunError, OSError, ValueError, yaml.YAMLError) as error:  # a table has room for the name, not for the path
        problems.append(f"{path.name} cannot be read: {_first_line(error)}".replace(str(path), path.name))
    if value is not None and not isinstance(value, type(kind())):
        problems.append(f"{path.name} holds no record of a run")
    return value if isinstance(value, type(kind())) else kind()
