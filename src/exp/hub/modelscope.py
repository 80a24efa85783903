"""ModelScope, for those whom Hugging Face's hub refuses or does not reach: ``init_from=ms:<owner>/<name>[@revision]``.

Its own package modelscope_hub downloads, resumes and caches, and verifies each file against the SHA-256 of the
repository's listing. It reads MODELSCOPE_ENDPOINT, MODELSCOPE_API_TOKEN and MODELSCOPE_CACHE. The hub names no commit:
the digests of the files say what was used.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Any

from exp.errors import ConfigError, UnavailableError, first_line
from exp.hub.files import (
    CONFIG_FILES,
    INDEX,
    MODEL_CARD,
    SINGLE_FILE,
    Source,
    UnreachableError,
    choose_weights,
    shards_of,
)
from exp.runs.files import file_digest


def _library(name: str) -> Any:
    try:
        import modelscope_hub
    except ImportError as error:
        raise UnavailableError(
            f"init_from={name} needs modelscope-hub, which is not installed",
            "pip install 'exp-accelerators[modelscope]' (Python 3.10 and newer), or give a file",
        ) from error
    logging.getLogger("modelscope_hub").setLevel(logging.ERROR)  # it warns of each new attempt
    return modelscope_hub


def find_cached(source: Source) -> Path | None:
    """Path of the weights, or of their index, in the cache; None: a file is missing.

    Raises:
        UnavailableError: modelscope_hub is not installed.
    """
    library = _library(source.name)
    hub = library.HubApi()

    def find(name: str) -> Path:
        return Path(
            hub.download_file(source.repository, "model", name, revision=source.revision, local_files_only=True)
        )

    for name in (SINGLE_FILE, INDEX):
        with contextlib.suppress(library.HubError):
            path = find(name)
            for part in shards_of(path) if name == INDEX else ():
                find(part)
            return path
    return None


def download(source: Source) -> Path:
    """Download the weights, the configuration files and the model card; returns the path of the weights or their index.

    Raises:
        ConfigError: there are no such weights, or access is refused.
        UnreachableError: the hub does not answer.
        UnavailableError: a file keeps differing from its digest, or modelscope_hub is not installed.
    """
    library = _library(source.name)
    hub = library.HubApi()
    try:
        listing = hub.list_repo_files(source.repository, "model", revision=source.revision)
        digests = {file.path: file.sha256 for file in listing if not file.is_dir}

        def fetch(name: str) -> Path:
            return Path(
                hub.download_file(
                    source.repository, "model", name, revision=source.revision, expected_sha256=digests.get(name)
                )
            )

        path = fetch(choose_weights(source, list(digests)))
        others = shards_of(path) if path.name == INDEX else []
        for name in [*others, *(name for name in (*CONFIG_FILES, MODEL_CARD) if name in digests)]:
            fetch(name)
        return path
    except (library.AuthenticationError, library.NotExistError, library.PermissionDeniedError) as error:
        raise ConfigError(
            f"init_from={source.name}: {endpoint()} does not give it ({type(error).__name__})",
            "check name and revision; a gated or private repository needs MODELSCOPE_API_TOKEN, of an account that may "
            "read it",
        ) from error
    except library.FileIntegrityError as error:
        raise UnavailableError(f"init_from={source.name}: {first_line(error)[:200]}", "start again") from error
    except library.HubError as error:
        raise UnreachableError(
            f"init_from={source.name}: cannot fetch it from {endpoint()} ({type(error).__name__}: "
            f"{first_line(error)[:120]})",
            "check the network and MODELSCOPE_ENDPOINT, set MODELSCOPE_CACHE to a cache that has it, or give a file",
        ) from error


def verify(path: Path) -> str:
    """SHA-256 of a file, which :func:`download` has compared with the listing's."""
    return file_digest(path)


def endpoint() -> str:
    """URL of the hub."""
    return str(_library("ms:").HubConfig().endpoint)
