"""One run as its folder tells of it, whatever became of the run."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator

import yaml

from exp.errors import RunError
from exp.result import selecting_value
from exp.runfolder import RunFolder, read_json, read_records

__all__ = ["Run", "flattened", "is_number", "is_run_folder", "natural", "numbers_of", "read_run"]

# libyaml's loader is some ten times as fast, and not in every build of PyYAML.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_PICTURES = (".png", ".jpg", ".jpeg")
# What only a training makes use of.
_OF_TRAINING = re.compile(
    r"(optim|schedule)\.|record\.chosen\.(optim|schedule)$"
    r"|(max_epochs|max_steps|batch_size|global_batch_size|accumulate|val_every|patience|min_delta)$"
)
_WITHOUT_PICTURES = {"checkpoints", "logs", "tensorboard", "trackers"}


@dataclass(frozen=True, eq=False)
class Run:
    """What a run folder holds.

    Attributes:
        folder: where it lies, absolute.
        name: short, and unique among the runs it was found with.
        config: the frozen configuration by dotted keys; lists are values. Empty where it cannot be read. A run that
            only used the weights of another one has that one's keys of training, or none where it is gone.
        overrides: what the user gave on the command line.
        result: ``result.json``; None where there is none, or where it cannot be read.
        problem: what is wrong with the folder's own files, in one line; None: nothing.
    """

    folder: Path
    name: str
    config: dict[str, Any]
    overrides: list[str]
    result: dict[str, Any] | None
    problem: str | None = None

    @property
    def status(self) -> str:
        """``completed``, ``failed``, ``preempted``, ``unfinished`` or ``pending``.

        A run without a result that has begun may still be running or may have been killed. Its folder cannot tell,
        so neither is claimed: it is unfinished.
        """
        if self.result is not None:
            return str(self.result.get("status") or "unfinished")
        logs = RunFolder(self.folder).logs
        return "unfinished" if logs.is_dir() and any(logs.iterdir()) else "pending"

    @property
    def metric_name(self) -> str | None:
        """The metric that is reported, and that runs are chosen by; None where the run has not come to say."""
        name = (self.result or {}).get("metric_name")
        return None if name is None else str(name)

    @property
    def metric(self) -> float | None:
        """Its value on test; None where there is none, or none that is finite."""
        value: Any = (self.result or {}).get("metric")
        return float(value) if is_number(value) else None

    @property
    def selected_by(self) -> float | None:
        """The same metric on validation, by which runs are ranked; None: the run has none."""
        value = selecting_value(self.result)
        return float(value) if value is not None and is_number(value) else None

    @property
    def metrics(self) -> dict[str, float]:
        """All metrics that are finite numbers, by name."""
        return numbers_of((self.result or {}).get("metrics"))

    @property
    def units(self) -> dict[str, str]:
        """What values a metric is of, where its name does not say it."""
        units = (self.result or {}).get("metric_units")
        return {str(name): str(unit) for name, unit in units.items()} if isinstance(units, dict) else {}

    @property
    def greater_is_better(self) -> bool:
        """Whether larger values of the metric are better."""
        return bool((self.result or {}).get("greater_is_better"))

    @property
    def error(self) -> str | None:
        """What the run failed of, in one line; else what is wrong with its files; None: nothing."""
        error = (self.result or {}).get("error")
        if not error:
            return self.problem
        if not isinstance(error, dict):
            return _first_line(error)
        message = _first_line(error.get("message") or "")
        kind = error.get("type")
        text = f"{kind}: {message}" if kind and message else str(kind or message)
        return text if error.get("rank") is None else f"rank {error['rank']}: {text}"

    def number(self, key: str) -> float | None:
        """A number of the result, such as ``wall_s``, ``steps`` or ``samples_per_second``; None: it has none."""
        value: Any = (self.result or {}).get(key)
        return value if is_number(value) else None

    def records(self) -> Iterator[dict[str, Any]]:
        """The lines of ``metrics.jsonl``, one after the other; nothing where there is no such file.

        A line that is no record is left out: the last one of a run that is being written, or was killed, may be cut.
        """
        try:
            file = RunFolder(self.folder).metrics.open(encoding="utf-8", errors="replace")
        except OSError:
            return
        with file:
            yield from read_records(file)

    def pictures(self) -> list[Path]:
        """The PNG and JPEG files of the run: those of ``plots`` first, curves last among them, then any others."""
        found: list[tuple[Any, Path]] = []
        for place, folders, files in os.walk(self.folder):
            below = Path(place).relative_to(self.folder)
            folders[:] = [
                name
                for name in folders
                if not (name.startswith(".") or (below == Path() and name in _WITHOUT_PICTURES))
                and not is_run_folder(Path(place, name))
            ]
            for name in files:
                if Path(name).suffix.lower() in _PICTURES and not name.startswith("."):
                    # Maps of class numbers are for programs; the overlays beside them show the same to people.
                    order = (below.parts[:1] != ("plots",), below.parts[:1] == ("classes",), len(below.parts))
                    found.append(((*order, name == "curves.png", natural(str(below / name))), Path(place, name)))
        return [path for _, path in sorted(found)]


def is_run_folder(path: Path) -> bool:
    """Whether a run was written there: its configuration, and how it came about or what became of it."""
    folder = RunFolder(path)
    return folder.config.is_file() and (
        folder.overrides.is_file() or folder.result.is_file() or folder.env.is_file() or folder.logs.is_dir()
    )


def read_run(folder: Path, name: str) -> Run:
    """The run in ``folder``. Raises nothing: what cannot be read is told in ``problem``."""
    place = RunFolder(folder)
    problems: list[str] = []
    config = _parsed(place.config, problems)
    overrides = _parsed(place.overrides, problems)
    result = _parsed(place.result, problems)
    if result is not None and not isinstance(result, dict):
        problems.append(f"{place.result.name} holds no record of a run")
        result = None
    problems += [f"{name} is not as it was written" for name in place.altered(result or {})]
    return Run(
        folder=place.path,
        name=name,
        config=_as_trained(flattened(config)) if isinstance(config, dict) else {},
        overrides=[str(override) for override in overrides] if isinstance(overrides, list) else [],
        result=result,
        problem="; ".join(problems) or None,
    )


def _as_trained(config: dict[str, Any]) -> dict[str, Any]:
    """With the keys of the training that the weights are of, where the run itself trained nothing.

    Its own are defaults that nothing was trained with, beside what was.
    """
    folder = config.get("record.trained_in")
    if folder is None:
        return config
    other = _parsed(RunFolder(Path(folder)).config, [])
    trained = flattened(other) if isinstance(other, dict) else {}
    rest = {key: value for key, value in config.items() if not _OF_TRAINING.match(key)}
    return {**rest, **{key: value for key, value in trained.items() if _OF_TRAINING.match(key)}}


def flattened(values: dict[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, with dotted keys; lists, and mappings without keys, stay values."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            flat.update(flattened(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def is_number(value: Any) -> bool:
    """Whether a value that a file holds is a finite number, and no truth value."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def natural(text: str) -> list[Any]:
    """A sort key for which 2 comes before 10."""
    parts = re.split(r"(\d+)", text)
    return [int(part) if number % 2 else part.lower() for number, part in enumerate(parts)]


def numbers_of(values: Any) -> dict[str, float]:
    """Of a mapping what is a finite number."""
    if not isinstance(values, dict):
        return {}
    return {str(key): value for key, value in values.items() if is_number(value)}


def _first_line(text: Any) -> str:
    return next((line.strip() for line in str(text).splitlines() if line.strip()), "")


def _parsed(path: Path, problems: list[str]) -> Any:
    try:
        return read_json(path) if path.suffix == ".json" else yaml.load(path.read_text("utf-8"), _LOADER)  # noqa: S506
    except FileNotFoundError:
        return None
    except RunError as error:  # which names the whole path; a table has room for the name
        problems.append(_first_line(error).replace(str(path), path.name))
        return None
    except (OSError, ValueError, yaml.YAMLError) as error:
        problems.append(f"{path.name} cannot be read: {_first_line(error)}")
        return None
