"""Keep a record of a run in one small file: its configuration, its log, the versions it ran with, and their digest.

    python docs/keep_result.py outputs/etth1                # a run folder, or that of a sweep
    python docs/keep_result.py outputs/etth1 --into docs/results
    python docs/keep_result.py --check docs/results         # that no record has been changed since

A record is ``<experiment>-<horizon>-seed<seed>.json`` (without the horizon where the data have none). It has no paths
and no names of hosts. ``docs/about/results.md`` links to those of its rows.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from pathlib import Path
from typing import Any, Sequence

from omegaconf import OmegaConf

import exp
from exp.config.resolve import create
from exp.data.base import Data
from exp.errors import ConfigError, ExpError
from exp.report.runs import find_runs
from exp.runs.files import read_json, to_json, write_atomically
from exp.runs.folder import RunFolder

__all__ = ["check", "keep", "record_of"]

# Say nothing about what was computed, or where it was.
_SILENT = re.compile(r"(?:output_dir|overwrite|plots|resume|run|figures|data\.root|(?:sweep|hydra|logger)\b.*)=")
_SILENT_KEYS = ("output_dir", "overwrite", "plots", "resume", "run", "sweep", "record", "launcher", "logger", "figures")
_RESULT = ("status", "task", "experiment", "metrics", "metric_units", "measured_on", "reference", "differs", "data",
           "steps", "epochs", "best_epoch", "tested_epoch", "tested_step", "validation", "backend", "simulated",
           "device_type", "fallback", "precision", "world_size", "global_batch_size", "wall_s")  # fmt: skip


def record_of(folder: Path) -> dict[str, Any]:
    """What is kept of a completed run.

    Args:
        folder: the run folder.

    Raises:
        ConfigError: it is not completed, began in another folder, or was not computed by a commit (its sources had
            been changed).
    """
    run = exp.open_run(folder)
    files = RunFolder(folder)
    result, env = run.result, read_json(files.env) or {}
    if result.get("status") != "completed":
        raise ConfigError(f"{folder} is {result.get('status', 'unfinished')}; only a completed run is kept")
    revision = env.get("git_revision")
    if revision is None or revision.endswith("-dirty"):
        raise ConfigError(f"{folder} was computed by sources that no commit has ({revision}); commit, and run it again")
    log = _log(files.metrics)
    began = next((line["epoch"] for line in log if line["split"] == "train"), 0)
    if began > 0:
        raise ConfigError(f"{folder} has no log of its first {began} epochs: it went on from another run; run it whole")
    config: Any = OmegaConf.to_container(OmegaConf.load(files.config), resolve=True)
    overrides: Any = OmegaConf.to_container(OmegaConf.load(files.overrides))
    weights = None
    if result.get("tested_checkpoint"):
        weights = _sha256(folder / result["tested_checkpoint"])
    record = {
        "command": " ".join(["python -m exp", *map(_word, (word for word in overrides if not _SILENT.match(word)))]),
        "result": {key: result.get(key) for key in _RESULT},
        "versions": {key: env.get(key) for key in ("exp", "git_revision", "python", "packages")},
        "devices": [device["name"] for device in result.get("devices", [])],
        "config": _without_paths({key: value for key, value in config.items() if key not in _SILENT_KEYS}),
        "log": log,
        "sha256": {"weights": weights, "metrics.jsonl": _sha256(files.metrics)},
        "data": create(run.config.data, Data, "data").fingerprint(),
    }
    record = json.loads(to_json(record))  # keys that are numbers are texts in JSON, and sorted as such
    return {**record, "digest": _digest(record)}


def _log(path: Path) -> list[dict[str, Any]]:
    """Of training, the last line of each epoch; all others."""
    if not path.is_file():
        return []
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    kept = []
    for line, following in zip(lines, [*lines[1:], {}]):
        if line["split"] != "train" or following.get("split") != "train" or following["epoch"] != line["epoch"]:
            kept.append({key: value for key, value in line.items() if key != "units"})
    return kept


def _without_paths(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_paths(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_without_paths(each) for each in value]
    return f".../{Path(value).name}" if isinstance(value, str) and Path(value).is_absolute() else value


def _word(override: str) -> str:
    """An override, of a path its last part alone."""
    key, _, value = override.partition("=")
    return f"{key}={_without_paths(value)}"


def _sha256(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def _digest(record: dict[str, Any]) -> str:
    """SHA-256 of a record without its digest, as JSON with sorted keys."""
    content = {key: value for key, value in record.items() if key != "digest"}
    return hashlib.sha256(to_json(content, sort_keys=True).encode()).hexdigest()


def keep(paths: Sequence[str], into: Path) -> list[Path]:
    """Write the records of runs; those that are there are replaced.

    Args:
        paths: run folders, or folders of sweeps.
        into: folder of the records.

    Returns:
        The files, one for each run.

    Raises:
        ConfigError: there is no run, one cannot be kept, or two would have one name.
    """
    records = {}
    for run in find_runs(list(paths)):
        record = record_of(run.folder)
        config, horizon = record["config"], record["config"]["data"].get("horizon")
        parts = (config["name"], horizon, f"seed{config['seed']}")
        name = "-".join(str(part) for part in parts if part is not None)
        if name in records:
            raise ConfigError(f"{run.folder} would be {name}.json, as another run is; keep one of them")
        records[name] = record
    written = []
    for name, record in records.items():
        file = into / f"{name}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, (to_json(record, indent=1) + "\n").encode())
        written.append(file)
    return written


def check(folder: Path) -> list[Path]:
    """The records in a folder and those below it whose digest is not that of their content."""
    changed = []
    for file in sorted(folder.rglob("*.json")):
        record = json.loads(file.read_text(encoding="utf-8"))
        if record.get("digest") != _digest(record):
            changed.append(file)
    return changed


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns its exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("paths", nargs="*", help="run folders, or folders of sweeps")
    parser.add_argument("--into", type=Path, default=Path(__file__).parent / "results", help="folder of the records")
    parser.add_argument("--check", type=Path, help="say which records in this folder have been changed")
    given = parser.parse_args(arguments)
    try:
        if given.check is not None:
            changed = check(given.check)
            for file in changed:
                sys.stdout.write(f"{file}: its content is not what its digest says\n")
            return 1 if changed else 0
        if not given.paths:
            raise ConfigError("name a run folder, or that of a sweep")
        for file in keep(given.paths, given.into):
            sys.stdout.write(f"{file}\n")
    except ExpError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
