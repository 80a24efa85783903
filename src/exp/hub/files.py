"""Files of published weights: names, parts, and a repository's folder in the cache of a hub."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import NamedTuple, Sequence

import yaml

from exp.errors import CheckpointError, ConfigError, UnavailableError
from exp.runs.files import read_json

INDEX = "model.safetensors.index.json"
"""Index of weights that are split into several files: maps tensors to files."""
SINGLE_FILE = "model.safetensors"
CONFIG_FILES = ("config.json", "preprocessor_config.json")
MODEL_CARD = "README.md"
_SOURCE = re.compile(r"(hf|ms|timm):((?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*)(?:@(\w[\w./-]*))?", re.ASCII)
_DEFAULT_REVISION = {"hf": "main", "ms": "master"}


class UnreachableError(UnavailableError):
    """A hub does not answer; what its cache has can be used."""


class Source(NamedTuple):
    """A repository of weights.

    Attributes:
        name: value of ``init_from``, as the user gave it.
        hub: ``hf`` (also of ``timm:``) or ``ms``.
        repository: ``<owner>/<name>``.
        revision: a branch, a tag or a commit.
    """

    name: str
    hub: str
    repository: str
    revision: str


def parse(text: str) -> Source:
    """Parse a value of ``init_from``; without a revision it is ``main``, or ``master`` for ``ms``.

    Raises:
        ConfigError: the text has another form.
    """
    match = _SOURCE.fullmatch(text)
    if match is None or (match[1] == "timm") == ("/" in match[2]) or ".." in text:
        raise ConfigError(
            f"init_from={text} is not a name of weights",
            "write hf:<owner>/<name>, hf:<owner>/<name>@<revision>, ms:<owner>/<name> or timm:<name>",
        )
    hub, repository = ("hf", f"timm/{match[2]}") if match[1] == "timm" else (match[1], match[2])
    return Source(text, hub, repository, match[3] or _DEFAULT_REVISION[hub])


def choose_weights(source: Source, names: Sequence[str]) -> str:
    """The file of weights, or their index, among the names of a repository's files.

    Raises:
        ConfigError: there is neither.
    """
    first = next((name for name in (SINGLE_FILE, INDEX) if name in names), None)
    if first is None:
        raise ConfigError(
            f"init_from={source.name}: {source.repository} has neither {SINGLE_FILE} nor {INDEX} (it has "
            f"{', '.join(names[:8]) or 'nothing'})",
            "download a file of it and set init_from to its path",
        )
    return first


def shards_of(index: Path) -> list[str]:
    """The names of the files that an index lists, sorted.

    Raises:
        CheckpointError: the file is not an index, or names files in another folder or of another format.
    """
    content = read_json(index)
    names = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(names, dict) or not names:
        raise CheckpointError(f"{index} has no weight_map")
    files = sorted({str(name) for name in names.values()})
    if any(PurePosixPath(name).name != name or not name.endswith(".safetensors") for name in files):
        raise CheckpointError(f"{index} names files that are in another folder, or are not .safetensors")
    return files


def weights_of(path: Path) -> list[Path]:
    """The weight files: the file itself and, if it is an index, the files that it lists."""
    return [path, *map(path.with_name, shards_of(path) if path.name == INDEX else ())]


def files_of(path: Path) -> list[Path]:
    """The files of weights: the file, those that it lists if it is an index, and the JSON files beside it."""
    return [file for file in [*weights_of(path), *map(path.with_name, CONFIG_FILES)] if file.is_file()]


def read_license(path: Path) -> str | None:
    """The license in the model card beside weights: ``license_name`` if present (then ``license`` is ``other``).

    Returns:
        The name; None: there is no card, or none that can be read.
    """
    try:
        parts = path.with_name(MODEL_CARD).read_text(encoding="utf-8").split("---\n", 2)
        stated = yaml.safe_load(parts[1]) if len(parts) == 3 and not parts[0].strip() else None
    except (OSError, ValueError, yaml.YAMLError):
        return None
    name = stated.get("license_name") or stated.get("license") if isinstance(stated, dict) else None
    return name if isinstance(name, str) else None


def snapshot_in(folder: Path) -> Path:
    """The folder of the files in a repository's folder of a hub's cache; ``folder`` itself if it is no such folder.

    Raises:
        ConfigError: the cache has several commits, and none of them is ``main``.
    """
    main = folder / "refs" / "main"
    commits = sorted(folder.glob("snapshots/*"))
    commit = folder / "snapshots" / main.read_text().strip() if main.is_file() else None
    if commit in commits or not commits:
        return commit if commit in commits and commit is not None else folder
    if len(commits) > 1:
        raise ConfigError(f"init_from={folder} has several commits", f"give one: {', '.join(map(str, commits))}")
    return commits[0]
