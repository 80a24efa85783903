"""What the cache of huggingface_hub holds, by its documented layout: ``models--<owner>--<name>/snapshots/<commit>``."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from exp.errors import UnavailableError
from exp.hub.download import SHA256, sha256_of

__all__ = [
    "COMMIT",
    "INDEX",
    "WHOLE",
    "Source",
    "cache_folder",
    "cached",
    "digest",
    "endpoint",
    "library_for",
    "licence",
    "shards_of",
]

INDEX = "model.safetensors.index.json"
"""Says which tensors lie in which of several files."""
WHOLE = "model.safetensors"
COMMIT = re.compile(r"^[0-9a-f]{40}$")
_LICENCE = re.compile(r"^(license|license_name):[ \t]*['\"]?([^'\"\n]+?)['\"]?[ \t]*$", re.MULTILINE)


class Source(NamedTuple):
    """Where weights are.

    Attributes:
        name: as the user gave it.
        repository: ``<owner>/<name>``.
        revision: a branch, a tag or a commit.
    """

    name: str
    repository: str
    revision: str


def shards_of(index: Path) -> list[str]:
    """The names of the files that an index lists, sorted.

    Raises:
        ValueError: it is none, or names files elsewhere.
    """
    content = json.loads(index.read_text(encoding="utf-8"))
    names = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(names, dict) or not names:
        raise ValueError(f"{index} has no weight_map")
    found = sorted({str(name) for name in names.values()})
    if any(PurePosixPath(name).name != name or not name.endswith(".safetensors") for name in found):
        raise ValueError(f"{index} names files that are not beside it, or no .safetensors")
    return found


def library_for(name: str) -> Any:
    """The module huggingface_hub.

    Args:
        name: of the weights, for the message.

    Raises:
        UnavailableError: it is not installed.
    """
    try:
        import huggingface_hub
    except ImportError as error:
        raise UnavailableError(
            f"init_from={name} needs huggingface_hub, which is not installed; pip install 'exp[hub]', or give a file"
        ) from error
    return huggingface_hub


def cached(source: Source) -> Path | None:
    """The file in the library's cache, whole; None: it is not there. The layout is the documented one."""
    folder = cache_folder(source)
    commit = source.revision
    if not COMMIT.match(commit):
        try:
            commit = (folder / "refs" / commit).read_text().strip()
        except OSError:
            return None
    snapshot = folder / "snapshots" / commit
    if (snapshot / WHOLE).is_file():
        return snapshot / WHOLE
    if (snapshot / INDEX).is_file():
        try:
            whole = all((snapshot / name).is_file() for name in shards_of(snapshot / INDEX))
        except ValueError:
            return None
        return snapshot / INDEX if whole else None
    others = sorted(snapshot.glob("*.safetensors"))
    return others[0] if len(others) == 1 else None


def cache_folder(source: Source) -> Path:
    """Where the cache has a repository, or would have it."""
    library_for(source.name)
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE) / f"models--{source.repository.replace('/', '--')}"


def digest(path: Path) -> str:
    """SHA-256 of a file; the cache calls a large file by it, which was checked when it came."""
    name = path.resolve().name
    if SHA256.match(name):
        return name
    return sha256_of(path)


def licence(card: Path) -> str | None:
    """The licence that a model card states, by its own name where the field only says ``other``."""
    try:
        head = card.read_text(encoding="utf-8", errors="replace").split("\n---", 1)[0]
    except OSError:
        return None
    found = dict(_LICENCE.findall(head))
    return found.get("license_name") if found.get("license", "other") == "other" else found["license"]


def endpoint() -> str:
    """The hub, or the mirror that HF_ENDPOINT names."""
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
