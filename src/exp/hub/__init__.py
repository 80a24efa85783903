"""Weights by name: ``init_from=hf:<owner>/<name>[@revision]`` and ``timm:<name>[@revision]``, by huggingface_hub.

``timm:<name>`` is short for ``hf:timm/<name>``: many published weights have copies there that nobody has to apply for.
The library's own variables count: HF_ENDPOINT (a mirror), HF_TOKEN, HF_HOME and HF_HUB_CACHE, HF_HUB_OFFLINE. Whoever
starts ranks brings the file into the cache first (:func:`bring`); a lock on each file lets one process of a machine
fetch it while the others wait. Imports neither torch nor, before it is needed, the library.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Sequence

from exp import console
from exp.errors import ConfigError, UnavailableError
from exp.hub.cache import (
    COMMIT,
    INDEX,
    WHOLE,
    Source,
    cache_folder,
    cached,
    digest,
    endpoint,
    library_for,
    licence,
    shards_of,
)
from exp.hub.download import fetch_blob
from exp.hub.refusal import refusal
from exp.runfolder import without_credentials

if TYPE_CHECKING:
    from exp.config.schema import ExpConfig

__all__ = ["INDEX", "Source", "bring", "is_name", "local_file", "parse", "pinned", "shards_of"]

_NAME = re.compile(r"^(hf|timm):(.*)$")
_PART = r"[A-Za-z0-9][A-Za-z0-9._-]*"


def is_name(text: str | None) -> bool:
    """Whether ``init_from`` names weights of a hub, and no file."""
    return text is not None and _NAME.match(text) is not None


def parse(text: str) -> Source:
    """What a name means.

    Raises:
        ConfigError: it is not of the form.
    """
    match = _NAME.match(text)
    assert match is not None
    kind, rest = match.groups()
    repository, _, revision = rest.partition("@")
    repository = f"timm/{repository}" if kind == "timm" else repository
    if not re.fullmatch(f"{_PART}/{_PART}", repository) or (not revision and "@" in rest):
        raise ConfigError(
            f"init_from={text} is no name of weights; write hf:<owner>/<name>, hf:<owner>/<name>@<revision> or "
            "timm:<name>"
        )
    return Source(text, repository, revision or "main")


def pinned(config: ExpConfig) -> str | None:
    """``init_from`` with the commit that :func:`bring` found: the same weights on all nodes, whenever they look."""
    commit = config.record.weights.get("commit")
    if not is_name(config.init_from) or not commit:
        return config.init_from
    return f"hf:{parse(str(config.init_from)).repository}@{commit}"


def bring(config: ExpConfig) -> None:
    """Have the weights of ``init_from`` on this machine, where it names some; ``config.record.weights`` says which.

    Called before ranks start: in the parent, and on each node of a job.

    Raises:
        ConfigError: there are no such weights, or none that may be loaded.
        UnavailableError: huggingface_hub is missing, or the hub cannot be reached and the cache does not have them.
    """
    if not is_name(config.init_from):
        return
    found = _fetch(parse(str(pinned(config))))
    about = {**found, "source": config.init_from}
    if dict(config.record.weights) != about:
        config.record.weights = about
        stated = found["licence"] or "not stated; see its page"
        console.make_console().print(
            f"weights: {found['repository']} at {found['commit'][:8]}, licence: {stated}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )


def local_file(name: str) -> Path:
    """The file of weights that have been brought; brings them where this machine's cache does not have them.

    Args:
        name: of :func:`pinned`.

    Raises:
        ConfigError: as :func:`bring`.
        UnavailableError: likewise.
    """
    source = parse(name)
    path = cached(source)
    if path is None:
        _fetch(source)
        path = cached(source)
    if path is None:
        raise UnavailableError(f"init_from={name} has gone from the cache {cache_folder(source)}; start again")
    return path


def _fetch(source: Source) -> dict[str, Any]:
    """Bring the files of a source into the library's cache.

    Returns:
        ``{"repository", "commit", "files": {name: sha256}, "licence", "endpoint"}``.
    """
    library = library_for(source.name)
    library.logging.set_verbosity_error()
    library.utils.disable_progress_bars()  # of the small files; a large one has ours
    before = cached(source)
    if before is None or not COMMIT.match(source.revision):
        console.wait_for(f"asking {without_credentials(endpoint())} for {source.repository}")
        try:
            _download(library, source)
        except (ConfigError, UnavailableError):
            raise
        except Exception as error:  # of two HTTP libraries, by version of huggingface_hub
            refused = refusal(library, source, error)
            if isinstance(refused, ConfigError) or before is None:
                raise refused from error
            if not isinstance(error, library.errors.OfflineModeIsEnabled):
                console.warn(f"{str(refused).partition(';')[0]}; going on with the copy in the cache")
        finally:
            console.waited()
    path = cached(source)
    if path is None:
        raise UnavailableError(
            f"init_from={source.name} is not in the cache {cache_folder(source)} although it was fetched; is there "
            "another HF_HUB_CACHE?"
        )
    names = [path.name, *(shards_of(path) if path.name == INDEX else ())]
    return {
        "repository": source.repository,
        "commit": path.parent.name,
        "files": {name: digest(path.parent / name) for name in names},
        "licence": licence(path.parent / "README.md"),
        "endpoint": without_credentials(endpoint()),
    }


def _download(library: Any, source: Source) -> None:
    """Fetch what :func:`_chosen` chooses; whatever was begun before is continued."""
    info = library.HfApi().model_info(source.repository, revision=source.revision)
    names = [sibling.rfilename for sibling in info.siblings or ()]
    chosen = _chosen(source, names)

    def get(name: str, revision: str) -> Path:
        if name.endswith(".safetensors"):
            fetch_blob(library, source.repository, name, revision, cache_folder(source))
        return Path(library.hf_hub_download(source.repository, name, revision=revision))

    first = get(chosen, source.revision)  # by its own name, which the cache notes: for use without a network
    commit = first.parent.name
    if chosen == INDEX:
        try:
            shards = shards_of(first)
        except ValueError as error:
            raise ConfigError(f"init_from={source.name}: {error}; take another revision") from error
        for name in shards:
            get(name, commit)
    if "README.md" in names:
        get("README.md", commit)


def _chosen(source: Source, names: Sequence[str]) -> str:
    """The file of a repository that is loaded.

    Raises:
        ConfigError: there is none, or more than one that it could be.
    """
    for name in (WHOLE, INDEX):
        if name in names:
            return name
    others = [name for name in names if name.endswith(".safetensors") and "/" not in name]
    if len(others) == 1:
        return others[0]
    there = ", ".join(others or names[:8]) or "nothing"
    raise ConfigError(
        f"init_from={source.name}: {source.repository} has no {WHOLE}, nor {INDEX} (it has {there}); fetch a file of "
        "it yourself and give its path"
    )
