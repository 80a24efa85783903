"""Weights by name: ``init_from=hf:<owner>/<name>[@revision]`` and ``timm:<name>[@revision]``, by huggingface_hub.

``timm:<name>`` is short for ``hf:timm/<name>``: many published weights have copies there that nobody has to apply for.
The library fetches, resumes and caches, and its own variables count: HF_ENDPOINT (a mirror), HF_TOKEN, HF_HOME and
HF_HUB_CACHE, HF_HUB_OFFLINE, HF_HUB_DOWNLOAD_TIMEOUT. It neither compares a file with its digest nor looks at what a
mirror calls a digest before that becomes the name of a file; this module does. Whoever starts ranks brings the files
into the cache first (:func:`bring`). Imports neither torch nor, before it is needed, the library.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

from exp import console
from exp.config.compose import is_of_hub
from exp.errors import ConfigError, ExpError, UnavailableError

if TYPE_CHECKING:
    from exp.config.schema import ExpConfig

__all__ = ["INDEX", "Source", "bring", "local_file", "parse", "pinned", "shards_of"]

INDEX = "model.safetensors.index.json"
"""Says which tensors lie in which of several files."""
_WHOLE = "model.safetensors"
_BESIDE = ("config.json", "preprocessor_config.json")
_CARD = "README.md"
_SOURCE = re.compile(r"(hf|timm):((?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*)(?:@(\w[\w./-]*))?", re.ASCII)
_PATIENCE_S = 10.0  # for an answer without content
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_PASSWORD = re.compile(r"(?<=//)[^/@\s]*@")


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


def parse(text: str) -> Source:
    """The repository and revision of a name.

    Raises:
        ConfigError: it is not of the form.
    """
    match = _SOURCE.fullmatch(text)
    if match is None or (match[1] == "hf") != ("/" in match[2]) or ".." in text:
        raise ConfigError(
            f"init_from={text} is no name of weights; write hf:<owner>/<name>, hf:<owner>/<name>@<revision> or "
            "timm:<name>"
        )
    return Source(text, match[2] if match[1] == "hf" else f"timm/{match[2]}", match[3] or "main")


def pinned(config: ExpConfig) -> str | None:
    """``init_from`` with the commit that :func:`bring` found: the same weights on all nodes, whenever they look."""
    commit = config.record.weights.get("commit")
    if not is_of_hub(config.init_from) or not commit:
        return config.init_from
    return f"hf:{parse(str(config.init_from)).repository}@{commit}"


def bring(config: ExpConfig) -> None:
    """Have the weights of ``init_from`` on this machine, where it names some; ``config.record.weights`` says which.

    Called before ranks start: in the parent, and on each node of a job.

    Raises:
        ConfigError: there are no such weights, or none that may be loaded.
        UnavailableError: huggingface_hub is missing, the hub cannot be reached and the cache does not have them, or a
            file is not what its digest says.
    """
    if not is_of_hub(config.init_from):
        return
    source = parse(str(pinned(config)))
    path, files = _fetch(source, list(config.record.weights.get("files", ())))
    licence = _licence(path.parent / _CARD)
    about = {"source": config.init_from, "repository": source.repository, "commit": path.parent.name, "files": files,
             "licence": licence, "endpoint": _endpoint()}  # fmt: skip
    if dict(config.record.weights) != about:
        config.record.weights = about
        text = (
            f"weights: {source.repository} at {path.parent.name[:8]}, licence: {licence or 'not stated; see its page'}"
        )
        console.make_console().print(text, highlight=False, markup=False, soft_wrap=True)


def local_file(name: str) -> Path:
    """The file of weights that have been brought; brings them where this machine's cache does not have them.

    Args:
        name: of :func:`pinned`.

    Raises:
        ConfigError: as :func:`bring`.
        UnavailableError: likewise.
    """
    source = parse(name)
    return _cached(_library(name), source) or _fetch(source, [])[0]


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


def _library(name: str) -> Any:
    try:
        huggingface_hub: Any = importlib.import_module("huggingface_hub")
    except ImportError as error:
        raise UnavailableError(
            f"init_from={name} needs huggingface_hub, which is not installed; pip install 'exp-accelerators[hub]', or "
            "give a file"
        ) from error
    huggingface_hub.logging.set_verbosity_error()
    return huggingface_hub


def _fetch(source: Source, known: list[str]) -> tuple[Path, dict[str, str]]:
    """Bring the files of a source into the library's cache; those that are ``known`` to be all of it are not asked for.

    Returns:
        The file, and the SHA-256 of each, by name.
    """
    library = _library(source.name)
    path = _cached(library, source)
    if path is None or not known or not all((path.parent / name).is_file() for name in known):
        try:
            path = _download(library, source)
        except ExpError:
            raise
        except Exception as error:  # of two HTTP libraries, by version of huggingface_hub
            refused = _refusal(library, source, error)
            if path is None or isinstance(refused, ConfigError):
                raise refused from error
            console.warn(f"{str(refused).partition(';')[0]}; going on with the copy in the cache")
    names = [*_parts(path), *_BESIDE]
    return path, {name: _digest(path.parent / name) for name in names if (path.parent / name).is_file()}


def _licence(card: Path) -> str | None:
    """The licence that a model card states, by its own name where the field only says ``other``."""
    import huggingface_hub

    try:
        stated = huggingface_hub.metadata_load(card) or {}
    except Exception:  # noqa: BLE001 - there is none, or none that can be read: of the disk, of YAML, of the library
        return None
    return stated.get("license_name") or stated.get("license")


def _parts(path: Path) -> list[str]:
    """The names of the files that weights are made of: the file, and where that is an index those that it lists."""
    return [path.name, *(shards_of(path) if path.name == INDEX else ())]


def _cached(library: Any, source: Source) -> Path | None:
    """The file in the library's cache, with all its parts; None: it is not there."""
    for name in (_WHOLE, INDEX):
        found = library.try_to_load_from_cache(source.repository, name, revision=source.revision)
        if isinstance(found, str):  # else None, or a mark that the repository does not have it
            path = Path(found)
            if all((path.parent / part).is_file() for part in _parts(path)):
                return path
    return None


def _download(library: Any, source: Source) -> Path:
    """Fetch what is loaded, and what stands beside it."""
    info = library.HfApi().model_info(source.repository, revision=source.revision, timeout=_PATIENCE_S)
    there = [sibling.rfilename for sibling in info.siblings or ()]
    first = next((name for name in (_WHOLE, INDEX) if name in there), None)
    if first is None:
        raise ConfigError(
            f"init_from={source.name}: {source.repository} has no {_WHOLE}, nor {INDEX} (it has "
            f"{', '.join(there[:8]) or 'nothing'}); fetch a file of it yourself and give its path"
        )

    def fetch(name: str, revision: str) -> Path:
        url = library.hf_hub_url(source.repository, name, revision=revision)
        etag = library.get_hf_file_metadata(url, timeout=_PATIENCE_S).etag
        if not _DIGEST.fullmatch(etag or ""):
            raise UnavailableError(
                f"init_from={source.name}: {_endpoint()} gives {name} the ETag {str(etag)[:80]!r}, which is no digest "
                "to check the file by; set HF_ENDPOINT to another mirror"
            )
        return Path(library.hf_hub_download(source.repository, name, revision=revision))

    # By its own revision, which the cache notes for use without a network; the others by the commit that this is.
    path = fetch(first, source.revision)
    try:
        names = _parts(path)[1:]
    except ValueError as error:
        raise ConfigError(f"init_from={source.name}: {error}; take another revision") from error
    for name in [*names, *(name for name in (*_BESIDE, _CARD) if name in there)]:
        fetch(name, path.parent.name)
    return path


def _digest(path: Path) -> str:
    """SHA-256 of a file of the cache, whose blob has that as its name, or git's SHA-1 where it is small.

    Raises:
        UnavailableError: it is another file; it is removed.
    """
    sha256, git = hashlib.sha256(), hashlib.sha1(b"blob %d\0" % path.stat().st_size)  # noqa: S324
    with path.open("rb") as file:
        for block in iter(lambda: file.read(2**22), b""):
            sha256.update(block)
            git.update(block)
    blob = path.resolve()
    if blob != path and _DIGEST.fullmatch(blob.name) and blob.name not in (sha256.hexdigest(), git.hexdigest()):
        blob.unlink()
        raise UnavailableError(
            f"{path} is not what its digest says ({blob.name}), and is removed; start again to fetch it"
        )
    return sha256.hexdigest()


def _endpoint() -> str:
    """The hub, or the mirror that HF_ENDPOINT names, without a password in it."""
    return _PASSWORD.sub("", os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def _refusal(library: Any, source: Source, error: Exception) -> ConfigError | UnavailableError:
    """What a failure of the library means for the user, in one line."""
    missing = (library.errors.RepositoryNotFoundError, library.errors.RevisionNotFoundError)  # one that is gated, too
    kind, status = type(error).__name__, getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, missing) or status in (401, 403):
        return ConfigError(
            f"init_from={source.name}: {_endpoint()} does not give it ({kind}); check name and revision; a gated or "
            "private repository needs HF_TOKEN, of an account that may read it (many have open copies: timm:<name>)"
        )
    said = _PASSWORD.sub("", str(error)).strip().partition("\n")[0][:120]
    return UnavailableError(
        f"init_from={source.name}: cannot fetch it from {_endpoint()} ({kind}: {said}); unset HF_HUB_OFFLINE, set "
        "HF_ENDPOINT to a mirror or HF_HUB_CACHE to a cache that has it, or give a file that you have"
    )
