"""Pretrained weights from a hub: ``init_from=hf:<owner>/<name>[@revision]`` or ``timm:<name>[@revision]``.

``timm:<name>`` is short for ``hf:timm/<name>``: this owner has ungated copies of many published weights.
huggingface_hub downloads, resumes and caches, and reads its own environment variables: HF_ENDPOINT (a mirror),
HF_TOKEN, HF_HOME, HF_HUB_CACHE, HF_HUB_OFFLINE, HF_HUB_DOWNLOAD_TIMEOUT. It does not verify a file against its digest,
nor check the digest that a mirror sends before it uses it as a file name; this module does both. The process that
starts the ranks downloads the files first (:func:`download`). Imports no torch, and huggingface_hub only when it is
used.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

from exp import console
from exp.config.compose import is_hub_source
from exp.errors import CheckpointError, ConfigError, ExpError, UnavailableError, first_line
from exp.runs.files import file_digest, read_json

if TYPE_CHECKING:
    from exp.config.schema import ExpConfig

INDEX = "model.safetensors.index.json"
"""Index of weights that are split into several files: maps tensors to files."""
_SINGLE_FILE = "model.safetensors"
_CONFIG_FILES = ("config.json", "preprocessor_config.json")
_MODEL_CARD = "README.md"
_SOURCE = re.compile(r"(hf|timm):((?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*)(?:@(\w[\w./-]*))?", re.ASCII)
_PATIENCE_S = 10.0  # for requests of metadata; downloads have HF_HUB_DOWNLOAD_TIMEOUT
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_PASSWORD = re.compile(r"(?<=//)[^/@\s]*@")


class Source(NamedTuple):
    """A repository of weights.

    Attributes:
        name: value of ``init_from``, as the user gave it.
        repository: ``<owner>/<name>``.
        revision: a branch, a tag or a commit.
    """

    name: str
    repository: str
    revision: str


def parse(text: str) -> Source:
    """Parse a value of ``init_from``; without a revision it is ``main``.

    Raises:
        ConfigError: the text has another form.
    """
    match = _SOURCE.fullmatch(text)
    if match is None or (match[1] == "hf") != ("/" in match[2]) or ".." in text:
        raise ConfigError(
            f"init_from={text} is not a name of weights",
            "write hf:<owner>/<name>, hf:<owner>/<name>@<revision> or timm:<name>",
        )
    return Source(text, match[2] if match[1] == "hf" else f"timm/{match[2]}", match[3] or "main")


def with_commit(config: ExpConfig) -> str | None:
    """``init_from`` with the commit that :func:`download` found, so that all nodes load the same weights."""
    commit = config.record.weights.get("commit")
    if not is_hub_source(config.init_from) or not commit:
        return config.init_from
    return f"hf:{parse(str(config.init_from)).repository}@{commit}"


def download(config: ExpConfig) -> None:
    """Download the weights of ``init_from`` into the cache, if it names a repository, and print their license.

    Called before the ranks start, in the parent and on each node of a job. Sets ``config.record.weights`` (repository,
    commit, SHA-256 of the files, license, hub).

    Raises:
        ConfigError: there are no such weights, access is refused, or they have no file that can be loaded.
        UnavailableError: huggingface_hub is not installed; the hub cannot be reached and the cache does not have the
            weights; or a file does not match its digest.
    """
    if not is_hub_source(config.init_from):
        return
    source = parse(str(with_commit(config)))
    path, files = _fetch(source, list(config.record.weights.get("files", ())))
    license_name = _license(path.parent / _MODEL_CARD)
    about = {"source": config.init_from, "repository": source.repository, "commit": path.parent.name, "files": files,
             "license": license_name, "endpoint": _endpoint()}  # fmt: skip
    if dict(config.record.weights) != about:
        config.record.weights = about
        terms = license_name or "not stated; see its page"
        text = f"weights: {source.repository} at {path.parent.name[:8]}, license: {terms}"
        console.make_console().print(text, highlight=False, markup=False, soft_wrap=True)


def local_file(name: str) -> Path:
    """Path of the weights in the cache; downloads them if they are not there.

    Args:
        name: result of :func:`with_commit`.

    Returns:
        Path of ``model.safetensors``, or of the index if the weights are several files.

    Raises:
        ConfigError: as :func:`download`.
        UnavailableError: as :func:`download`.
    """
    source = parse(name)
    return _cached(_library(name), source) or _fetch(source, [])[0]


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


def _library(name: str) -> Any:
    try:
        import huggingface_hub
    except ImportError as error:
        raise UnavailableError(
            f"init_from={name} needs huggingface_hub, which is not installed",
            "pip install 'exp-accelerators[hub]', or give a file",
        ) from error
    huggingface_hub.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    return huggingface_hub


def _fetch(source: Source, files: list[str]) -> tuple[Path, dict[str, str]]:
    """Download the files of a source into the cache, and verify them.

    Args:
        source: the repository and its revision.
        files: names of all its files, if an earlier call has found them; if all are in the cache, the hub is not asked.

    Returns:
        Path of the weights or of their index, and SHA-256 of each file by name.
    """
    library = _library(source.name)
    path = _cached(library, source)
    if path is None or not files or not all(path.with_name(name).is_file() for name in files):
        try:
            path = _download(library, source)
        except ExpError:
            raise
        except Exception as error:  # its type depends on the HTTP library, which depends on the huggingface_hub version
            exp_error = _as_exp_error(library, source, error)
            if path is None or isinstance(exp_error, ConfigError):
                raise exp_error from error
            console.warn(f"{exp_error.finding}; using the copy in the cache")
    return path, {file.name: _verified_digest(file) for file in files_of(path)}


def files_of(path: Path) -> list[Path]:
    """The files of weights: the file, those that it lists if it is an index, and the JSON files beside it."""
    return [file for file in [*_weights(path), *map(path.with_name, _CONFIG_FILES)] if file.is_file()]


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


def _license(card: Path) -> str | None:
    """The license in a model card: ``license_name`` if present (then ``license`` is ``other``), else ``license``."""
    import huggingface_hub

    try:
        stated = huggingface_hub.metadata_load(card) or {}
    except Exception:  # noqa: BLE001 - no card, or one that cannot be read: errors of the disk, of YAML, of the library
        return None
    return stated.get("license_name") or stated.get("license")


def _weights(path: Path) -> list[Path]:
    """The weight files: the file itself and, if it is an index, the files that it lists."""
    return [path, *map(path.with_name, shards_of(path) if path.name == INDEX else ())]


def _cached(library: Any, source: Source) -> Path | None:
    """Path of the weights in the cache; None: a file is missing."""
    for name in (_SINGLE_FILE, INDEX):
        path = library.try_to_load_from_cache(source.repository, name, revision=source.revision)
        # Otherwise None, or a marker object: the repository has no such file.
        if isinstance(path, str) and all(file.is_file() for file in _weights(Path(path))):
            return Path(path)
    return None


def _download(library: Any, source: Source) -> Path:
    """Download the weights, the configuration files and the model card."""
    info = library.HfApi().model_info(source.repository, revision=source.revision, timeout=_PATIENCE_S)
    names = [sibling.rfilename for sibling in info.siblings or ()]
    first = next((name for name in (_SINGLE_FILE, INDEX) if name in names), None)
    if first is None:
        raise ConfigError(
            f"init_from={source.name}: {source.repository} has neither {_SINGLE_FILE} nor {INDEX} (it has "
            f"{', '.join(names[:8]) or 'nothing'})",
            "download a file of it and set init_from to its path",
        )

    def fetch(name: str, revision: str) -> Path:
        url = library.hf_hub_url(source.repository, name, revision=revision)
        etag = library.get_hf_file_metadata(url, timeout=_PATIENCE_S).etag
        if not _DIGEST.fullmatch(etag or ""):
            raise UnavailableError(
                f"init_from={source.name}: {_endpoint()} gives {name} the ETag {str(etag)[:80]!r}, which is no digest, "
                "so the file cannot be verified",
                "set HF_ENDPOINT to another mirror",
            )
        return Path(library.hf_hub_download(source.repository, name, revision=revision))

    # The first file by the user's revision, which the cache then resolves offline; the others by the commit found.
    path = fetch(first, source.revision)
    others = [file.name for file in _weights(path)[1:]]
    for name in [*others, *(name for name in (*_CONFIG_FILES, _MODEL_CARD) if name in names)]:
        fetch(name, path.parent.name)
    return path


def _verified_digest(path: Path) -> str:
    """Verify a file of the cache, and return its SHA-256.

    The cache names the stored file by its digest: SHA-256 for large files, git's SHA-1 for small ones.

    Raises:
        UnavailableError: the content does not match the digest; the file is removed.
    """
    sha256, blob = file_digest(path), path.resolve()
    content = path.read_bytes() if len(blob.name) == 40 else b""
    git = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()  # noqa: S324
    if blob != path and _DIGEST.fullmatch(blob.name) and blob.name not in (sha256, git):
        blob.unlink()
        raise UnavailableError(
            f"{path} does not match its digest ({blob.name}) and was removed", "start again to download it"
        )
    return sha256


def _endpoint() -> str:
    """URL of the hub, or of the mirror in HF_ENDPOINT without its password."""
    return _PASSWORD.sub("", os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def _as_exp_error(library: Any, source: Source, error: Exception) -> ConfigError | UnavailableError:
    """Turn an exception of huggingface_hub into an error with one line for the user."""
    missing = (library.errors.RepositoryNotFoundError, library.errors.RevisionNotFoundError)  # also for gated ones
    kind, status = type(error).__name__, getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, missing) or status in (401, 403):
        return ConfigError(
            f"init_from={source.name}: {_endpoint()} does not give it ({kind})",
            "check name and revision; a gated or "
            "private repository needs HF_TOKEN, of an account that may read it (many have open copies: timm:<name>)",
        )
    reason = _PASSWORD.sub("", first_line(error))[:120]
    return UnavailableError(
        f"init_from={source.name}: cannot fetch it from {_endpoint()} ({kind}: {reason})",
        "unset HF_HUB_OFFLINE, set "
        "HF_ENDPOINT to a mirror or HF_HUB_CACHE to a cache that has it, or give a file that you have",
    )
