"""Sets of runs: found on the disk, told apart, put in order."""

from __future__ import annotations

import glob
import os
from pathlib import Path
from typing import Iterator, Sequence

from exp.config.structures import task_named
from exp.errors import ConfigError
from exp.report.keys import differing
from exp.report.run import Run, is_run_folder, natural, read_run

__all__ = ["Run", "by_metric", "differing", "find_runs", "greater_is_better", "ranked"]

_PARTS_OF_A_RUN = {"checkpoints", "logs", "plots", "tensorboard", "trackers"}


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
            for found in sorted(_below(folder), key=lambda place: natural(str(place))):
                folders.setdefault(found)
    if not folders:
        raise ConfigError(
            f"no run found in {', '.join(map(str, paths)) or 'no path'}: a run folder has a config.yaml beside an "
            "overrides.yaml or a result.json; give a run folder, a folder of them, or a glob such as 'outputs/*/*'"
        )
    parent = Path(os.path.commonpath([folder.parent for folder in folders]))
    # Names of folders may be any bytes; those of runs can be printed.
    names = [os.fsencode(folder.relative_to(parent)).decode("utf-8", "replace") for folder in folders]
    runs = [read_run(folder, name) for folder, name in zip(folders, names)]
    compared = [run for run in runs if getattr(task_named(str(run.config.get("task.name"))), "compared", True)]
    if not compared:
        raise ConfigError(
            f"no run found in {', '.join(map(str, paths))}: only those of task={runs[0].config['task.name']}, which "
            "have no result; give the folder of a training, an evaluation or a sweep"
        )
    return compared


def by_metric(runs: Sequence[Run]) -> dict[str | None, list[Run]]:
    """Runs whose metrics can be compared, by the name of the metric, each group with the best on validation first.

    Those without a figure on validation, such as evaluations, come after them in their order. A run that did not come
    to say what its metric is goes with those of the same experiment and task; None has those that go with nobody.
    """
    kinds = {_kind(run): run.metric_name for run in runs if run.metric_name is not None}
    groups: dict[str | None, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.metric_name or kinds.get(_kind(run)), []).append(run)
    return {name: _best_first(groups[name]) for name in sorted(groups, key=lambda name: name is None)}


def ranked(runs: Sequence[Run]) -> list[Run]:
    """The best on validation first, then those without a metric; equals stay in their order.

    Metrics of different names cannot be compared: there the runs of the metric that occurs first come first.
    """
    ordered = [run for group in by_metric(runs).values() for run in group if run.metric is not None]
    return ordered + [run for run in runs if run.metric is None]


def greater_is_better(runs: Sequence[Run]) -> bool:
    """Whether larger values of the metric of these runs, which is the same for all, are better."""
    return any(run.greater_is_better for run in runs)


def _best_first(runs: Sequence[Run]) -> list[Run]:
    sign = -1.0 if greater_is_better(runs) else 1.0
    known = [run for run in runs if run.metric is not None]
    chosen = sorted(
        (run for run in known if run.selected_by is not None), key=lambda run: sign * (run.selected_by or 0)
    )
    return chosen + [run for run in known if run.selected_by is None] + [run for run in runs if run.metric is None]


def _kind(run: Run) -> tuple[object, object]:
    return run.config.get("name"), run.config.get("task.name")


def _matches(path: str) -> list[Path]:
    """The folders that a path or a glob stands for."""
    path = os.path.expanduser(path)  # noqa: PTH111 - a pattern, not a path
    place = Path(path)
    if place.is_dir():
        return [place.resolve()]
    if place.exists():
        raise ConfigError(f"{path} is a file, not a run folder; give the folder that it lies in")
    matches = [Path(match) for match in sorted(glob.glob(path, recursive=True), key=natural)]  # noqa: PTH207
    if not matches:
        what = "matches nothing" if glob.has_magic(path) else "does not exist"
        raise ConfigError(f"{path} {what}; give a run folder, a folder of them, or a glob such as 'outputs/*/*'")
    return [match.resolve() for match in matches if match.is_dir()]


def _below(folder: Path) -> Iterator[Path]:
    """The run folders in and below one."""
    if is_run_folder(folder):
        yield folder
        # Hydra numbers the jobs of a sweep, and notes the sweep in this file.
        swept = (folder / "multirun.yaml").is_file()
        children = [child for child in _children(folder) if swept or child.name.isdigit()]
        children = [child for child in children if child.name not in _PARTS_OF_A_RUN]
    else:
        children = _children(folder)
    for child in children:
        yield from _below(child)


def _children(folder: Path) -> list[Path]:
    try:
        entries = list(os.scandir(folder))
    except OSError:  # somebody else's
        return []
    # Links are not followed: they lead to runs that are found where they are, or around in circles.
    return [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False) and entry.name[0] != "."]
