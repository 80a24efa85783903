"""Pretrained weights by name: ``init_from=hf:<owner>/<name>[@revision]``, ``ms:<owner>/<name>`` or ``timm:<name>``.

``timm:<name>`` is short for ``hf:timm/<name>``: this owner has ungated copies of many published weights. The process
that starts the ranks downloads the files first (:func:`download`). Imports no torch, and a hub's package only when it
is used.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Mapping

from exp import console
from exp.config.compose import is_hub_source
from exp.errors import UnavailableError
from exp.hub import huggingface, modelscope
from exp.hub.files import Source, UnreachableError, files_of, parse, read_license

if TYPE_CHECKING:
    from exp.config.schema import ExpConfig


_HUBS: Mapping[str, ModuleType] = {"hf": huggingface, "ms": modelscope}


def with_commit(config: ExpConfig) -> str | None:
    """``init_from`` with the commit that :func:`download` found, so that all nodes load the same weights."""
    commit = config.record.weights.get("commit")
    if not is_hub_source(config.init_from) or not commit:
        return config.init_from
    source = parse(str(config.init_from))
    return f"{source.hub}:{source.repository}@{commit}"


def download(config: ExpConfig) -> None:
    """Download the weights of ``init_from`` into the cache, if it names a repository, and print their license.

    Called before the ranks start, in the parent and on each node of a job. Sets ``config.record.weights`` (repository,
    commit, SHA-256 of the files, license, hub); a hub without commits gives the revision in its place.

    Raises:
        ConfigError: there are no such weights, access is refused, or they have no file that can be loaded.
        UnavailableError: the hub's package is not installed; the hub cannot be reached and the cache does not have the
            weights; or a file does not match its digest.
    """
    if not is_hub_source(config.init_from):
        return
    source = parse(str(with_commit(config)))
    path, files = _fetch(source, config.record.weights.get("files", {}))
    hub = _HUBS[source.hub]
    commit = path.parent.name if source.hub == "hf" else source.revision
    license_name = read_license(path)
    about = {"source": config.init_from, "repository": source.repository, "commit": commit, "files": files,
             "license": license_name, "endpoint": hub.endpoint()}  # fmt: skip
    if dict(config.record.weights) != about:
        config.record.weights = about
        terms = license_name or "not stated; see its page"
        text = f"weights: {source.repository} at {commit[:8]}, license: {terms}"
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
    path: Path = _HUBS[source.hub].find_cached(source) or _fetch(source, {})[0]
    return path


def _fetch(source: Source, known: Mapping[str, str]) -> tuple[Path, dict[str, str]]:
    """Download the files of a source into the cache, and verify them.

    Args:
        source: the repository and its revision.
        known: SHA-256 by name, if an earlier call has found them; if all are in the cache, the hub is not asked.

    Returns:
        Path of the weights or of their index, and SHA-256 of each file by name.
    """
    hub = _HUBS[source.hub]
    path = hub.find_cached(source)
    if path is None or not known or not all(path.with_name(name).is_file() for name in known):
        try:
            path = hub.download(source)
        except UnreachableError as error:
            if path is None:
                raise
            console.warn(f"{error.finding}; using the copy in the cache")
    digests = {file.name: hub.verify(file) for file in files_of(path)}
    changed = [name for name, digest in known.items() if digests.get(name) != digest]
    if changed:
        raise UnavailableError(
            f"init_from={source.name}: {changed[0]} differs from what this job began with",
            "give all nodes the same cache, or a file",
        )
    return path, digests
