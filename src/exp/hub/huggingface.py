"""Hugging Face's hub: ``init_from=hf:<owner>/<name>[@revision]`` or ``timm:<name>[@revision]``.

huggingface_hub downloads, resumes and caches, and reads its own environment variables: HF_ENDPOINT (a mirror),
HF_TOKEN, HF_HOME, HF_HUB_CACHE, HF_HUB_OFFLINE, HF_HUB_DOWNLOAD_TIMEOUT. It does not verify a file against its digest,
nor check the digest that a mirror sends before it uses it as a file name; this module does both.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import Any

from exp.errors import ConfigError, ExpError, UnavailableError, first_line
from exp.hub.files import (
    CONFIG_FILES,
    INDEX,
    MODEL_CARD,
    SINGLE_FILE,
    Source,
    UnreachableError,
    choose_weights,
    weights_of,
)
from exp.runs.files import file_digest

_PATIENCE_S = 10.0  # for requests of metadata; downloads have HF_HUB_DOWNLOAD_TIMEOUT
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_PASSWORD = re.compile(r"(?<=//)[^/@\s]*@")


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


def find_cached(source: Source) -> Path | None:
    """Path of the weights, or of their index, in the cache; None: a file is missing.

    Raises:
        UnavailableError: huggingface_hub is not installed.
    """
    library = _library(source.name)
    for name in (SINGLE_FILE, INDEX):
        path = library.try_to_load_from_cache(source.repository, name, revision=source.revision)
        # Otherwise None, or a marker object: the repository has no such file.
        if isinstance(path, str) and all(file.is_file() for file in weights_of(Path(path))):
            return Path(path)
    return None


def download(source: Source) -> Path:
    """Download the weights, the configuration files and the model card; returns the path of the weights or their index.

    Raises:
        ConfigError: there are no such weights, or access is refused.
        UnreachableError: the hub does not answer.
        UnavailableError: it sends no digest, or huggingface_hub is not installed.
    """
    library = _library(source.name)
    try:
        return _download(library, source)
    except ExpError:
        raise
    except Exception as error:  # its type depends on the HTTP library, which depends on the huggingface_hub version
        raise _as_exp_error(library, source, error) from error


def _download(library: Any, source: Source) -> Path:
    info = library.HfApi().model_info(source.repository, revision=source.revision, timeout=_PATIENCE_S)
    names = [sibling.rfilename for sibling in info.siblings or ()]
    first = choose_weights(source, names)

    def fetch(name: str, revision: str) -> Path:
        url = library.hf_hub_url(source.repository, name, revision=revision)
        etag = library.get_hf_file_metadata(url, timeout=_PATIENCE_S).etag
        if not _DIGEST.fullmatch(etag or ""):
            raise UnavailableError(
                f"init_from={source.name}: {endpoint()} gives {name} the ETag {str(etag)[:80]!r}, which is no digest, "
                "so the file cannot be verified",
                "set HF_ENDPOINT to another mirror",
            )
        return Path(library.hf_hub_download(source.repository, name, revision=revision))

    # The first file by the user's revision, which the cache then resolves offline; the others by the commit found.
    path = fetch(first, source.revision)
    others = [file.name for file in weights_of(path)[1:]]
    for name in [*others, *(name for name in (*CONFIG_FILES, MODEL_CARD) if name in names)]:
        fetch(name, path.parent.name)
    return path


def verify(path: Path) -> str:
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


def endpoint() -> str:
    """URL of the hub, or of the mirror in HF_ENDPOINT without its password."""
    return _PASSWORD.sub("", os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def _as_exp_error(library: Any, source: Source, error: Exception) -> ConfigError | UnreachableError:
    """Turn an exception of huggingface_hub into an error with one line for the user."""
    missing = (library.errors.RepositoryNotFoundError, library.errors.RevisionNotFoundError)  # also for gated ones
    kind, status = type(error).__name__, getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, missing) or status in (401, 403):
        return ConfigError(
            f"init_from={source.name}: {endpoint()} does not give it ({kind})",
            "check name and revision; a gated or "
            "private repository needs HF_TOKEN, of an account that may read it (many have open copies: timm:<name>)",
        )
    reason = _PASSWORD.sub("", first_line(error))[:120]
    return UnreachableError(
        f"init_from={source.name}: cannot fetch it from {endpoint()} ({kind}: {reason})",
        "unset HF_HUB_OFFLINE, set "
        "HF_ENDPOINT to a mirror or HF_HUB_CACHE to a cache that has it, or give a file that you have",
    )
