"""Weights by name: ``init_from=hf:<owner>/<name>[@revision]`` and ``timm:<name>[@revision]``, by huggingface_hub.

``timm:<name>`` is short for ``hf:timm/<name>``: many published weights have copies there that nobody has to apply for.
The library fetches, resumes and caches, and its own variables count: HF_ENDPOINT (a mirror), HF_TOKEN, HF_HOME and
HF_HUB_CACHE, HF_HUB_OFFLINE, HF_HUB_DOWNLOAD_TIMEOUT. It neither compares a file with its digest nor looks at what a
mirror calls a digest before that becomes a path; this module does. Whoever starts ranks brings the files into the cache
first (:func:`bring`). Imports neither torch nor, before it is needed, the library.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import re
import sys
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Iterator, NamedTuple
from urllib.parse import urlsplit

from exp import console
from exp.errors import ConfigError, ExpError, UnavailableError

if TYPE_CHECKING:
    from exp.config.schema import ExpConfig

__all__ = ["INDEX", "Source", "bring", "is_name", "local_file", "parse", "pinned", "shards_of"]

INDEX = "model.safetensors.index.json"
"""Says which tensors lie in which of several files."""
_WHOLE = "model.safetensors"
_BESIDE = ("config.json", "preprocessor_config.json")
_CARD = "README.md"
_SOURCE = re.compile(r"(hf|timm):((?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*)(?:@(\w[\w./-]*))?", re.ASCII)
_ETAG = re.compile(r'(?:W/)?"?([0-9a-f]{64}|[0-9a-f]{40})"?')
_REDIRECTS = (301, 302, 303, 307, 308)
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


def is_name(text: str | None) -> bool:
    """Whether ``init_from`` names weights of a hub, and no file."""
    return text is not None and text.startswith(("hf:", "timm:"))


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
    if not is_name(config.init_from) or not commit:
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
    if not is_name(config.init_from):
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
    if not sys.stderr.isatty():
        huggingface_hub.utils.disable_progress_bars()
    return huggingface_hub


def _fetch(source: Source, known: list[str]) -> tuple[Path, dict[str, str]]:
    """Bring the files of a source into the library's cache; those that are ``known`` to be all of it are not asked for.

    Returns:
        The file, and the SHA-256 of each, by name.
    """
    library = _library(source.name)
    etags: dict[str, str] = {}
    path = _cached(library, source)
    if path is None or not known or not all((path.parent / name).is_file() for name in known):
        try:
            path, etags = _download(library, source)
        except ExpError:
            raise
        except Exception as error:  # of two HTTP libraries, by version of huggingface_hub
            refused = _refusal(library, source, error)
            if path is None or isinstance(refused, ConfigError):
                raise refused from error
            if not isinstance(error, library.errors.OfflineModeIsEnabled):
                console.warn(f"{str(refused).partition(';')[0]}; going on with the copy in the cache")
    names = [path.name, *(shards_of(path) if path.name == INDEX else ()), *_BESIDE]
    return path, {
        name: _digest(path.parent / name, etags.get(name)) for name in names if (path.parent / name).is_file()
    }


def _licence(card: Path) -> str | None:
    """The licence that a model card states, by its own name where the field only says ``other``."""
    import huggingface_hub

    try:
        stated = huggingface_hub.metadata_load(card) or {}
    except Exception:  # noqa: BLE001 - there is none, or none that can be read: of the disk, of YAML, of the library
        return None
    return stated.get("license_name") or stated.get("license")


def _cached(library: Any, source: Source) -> Path | None:
    """The file in the library's cache, with all its parts; None: it is not there."""
    for name in (_WHOLE, INDEX):
        found = library.try_to_load_from_cache(source.repository, name, revision=source.revision)
        if isinstance(found, str):  # else None, or a mark that the repository does not have it
            path = Path(found)
            with contextlib.suppress(ValueError):  # a damaged index
                if all((path.parent / part).is_file() for part in (shards_of(path) if name == INDEX else ())):
                    return path
    return None


def _download(library: Any, source: Source) -> tuple[Path, dict[str, str]]:
    """Fetch what is loaded, and what stands beside it: its path, and the digest that the hub says of each file."""
    from huggingface_hub.constants import HF_HUB_ETAG_TIMEOUT

    console.wait_for(f"asking {_endpoint()} for {source.repository}")
    try:
        info = library.HfApi().model_info(source.repository, revision=source.revision, timeout=HF_HUB_ETAG_TIMEOUT)
    finally:
        console.waited()
    there = [sibling.rfilename for sibling in info.siblings or ()]
    first = next((name for name in (_WHOLE, INDEX) if name in there), None)
    if first is None:
        raise ConfigError(
            f"init_from={source.name}: {source.repository} has no {_WHOLE}, nor {INDEX} (it has "
            f"{', '.join(there[:8]) or 'nothing'}); fetch a file of it yourself and give its path"
        )
    with _etags(library, source) as etags:
        # By its own revision, which the cache notes for use without a network; the others by the commit that this is.
        path = Path(library.hf_hub_download(source.repository, first, revision=source.revision))
        try:
            parts = shards_of(path) if first == INDEX else []
        except ValueError as error:
            raise ConfigError(f"init_from={source.name}: {error}; take another revision") from error
        for name in [*parts, *(name for name in (*_BESIDE, _CARD) if name in there)]:
            library.hf_hub_download(source.repository, name, revision=path.parent.name)
    return path, etags


@contextlib.contextmanager
def _etags(library: Any, source: Source) -> Iterator[dict[str, str]]:
    """Refuse what is no digest, in every answer about a file: the library makes a path of it. Gives them by file."""
    found: dict[str, str] = {}

    def check(answer: Any, *_: Any, **__: Any) -> None:
        said = answer.headers.get("X-Linked-Etag") or answer.headers.get("ETag")
        # A redirection within the hub is followed: this is not the answer that counts.
        followed = answer.status_code in _REDIRECTS and not urlsplit(answer.headers.get("Location", "//other")).netloc
        if answer.request.method != "HEAD" or said is None or followed or answer.status_code >= 400:
            return
        match, file = _ETAG.fullmatch(said), urlsplit(str(answer.request.url)).path.rpartition("/")[2]
        if match is None:
            raise UnavailableError(
                f"init_from={source.name}: {_endpoint()} gives {file} the ETag {said[:80]!r}, which is no digest to "
                "check the file by; set HF_ENDPOINT to another mirror"
            )
        found[file] = match[1]

    session = library.utils.get_session()  # of httpx or requests, by the library's version
    hooks = getattr(session, "event_hooks", None) or session.hooks
    hooks["response"].append(check)
    try:
        yield found
    finally:
        hooks["response"].remove(check)


def _digest(path: Path, etag: str | None) -> str:
    """SHA-256 of a file of the cache, which calls it by that, or by git's SHA-1 where it is small.

    Raises:
        UnavailableError: it is another file; it is removed.
    """
    if etag is None and path.is_symlink():  # to the blob, else (without symbolic links) nothing tells any more
        etag = Path(os.readlink(path)).name
    kinds = [hashlib.sha256()]
    if etag is not None and len(etag) == 40:  # git's; plain for some mirrors
        kinds += [hashlib.sha1(b"blob %d\0" % path.stat().st_size), hashlib.sha1()]  # noqa: S324
    with path.open("rb") as file:
        for block in iter(lambda: file.read(2**22), b""):
            for kind in kinds:
                kind.update(block)
    if etag is not None and etag not in [kind.hexdigest() for kind in kinds]:
        path.resolve().unlink()
        raise UnavailableError(f"{path} is not what its digest says ({etag}), and is removed; start again to fetch it")
    return kinds[0].hexdigest()


def _endpoint() -> str:
    """The hub, or the mirror that HF_ENDPOINT names, without a password in it."""
    return _PASSWORD.sub("", os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def _refusal(library: Any, source: Source, error: Exception) -> ConfigError | UnavailableError:
    """What a failure of the library means for the user, in one line."""
    errors, begin, where = library.errors, f"init_from={source.name}: ", f"{_endpoint()}/{source.repository}"
    if isinstance(error, errors.GatedRepoError):
        return ConfigError(
            f"{begin}{where} is gated: accept its licence there and set HF_TOKEN to a token of yours, or take a copy "
            "that is not (timm:<name>)"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return ConfigError(f"{begin}{where} has no revision {source.revision}; leave out @{source.revision} for main")
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.RepositoryNotFoundError) or status in (401, 403):
        return ConfigError(
            f"{begin}there is no {where}, or it is private; check the name, or set HF_TOKEN to a token that may read it"
        )
    from huggingface_hub.constants import HF_HUB_CACHE

    if isinstance(error, errors.OfflineModeIsEnabled):
        return UnavailableError(
            f"{begin}HF_HUB_OFFLINE is set, and the cache {HF_HUB_CACHE} does not have it; unset that, or copy the "
            "cache of a machine that has it"
        )
    said = _PASSWORD.sub("", str(error)).strip().splitlines()
    reason = f"{type(error).__name__}: {said[0][:120] if said else ''}".rstrip(": ")
    return UnavailableError(
        f"{begin}cannot fetch it from {_endpoint()} ({reason}); set HF_ENDPOINT to a mirror or HF_HUB_CACHE to a "
        "folder with room, or give a file that you have"
    )
