"""A large file of a hub into the cache of huggingface_hub, so that a fetch that was cut off goes on where it was.

The library's newer versions begin such a file anew. What is written here is a file of the cache as the library
documents it, ``blobs/<etag>``; the library then takes it for its own. Requests go through the library's own session, so
its token, mirror, proxy and certificates count.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
from pathlib import Path
from typing import Any, Iterator
from urllib.parse import urlsplit

from exp import console

__all__ = ["SHA256", "fetch_blob", "sha256_of"]

SHA256 = re.compile(r"^[0-9a-f]{64}$")
"""The etag of a large file, and its name in the cache."""
_BLOCK = 2**20
_ATTEMPTS = 5  # in a row that bring nothing
_OK, _PARTIAL, _BEYOND = 200, 206, 416


def fetch_blob(library: Any, repository: str, name: str, revision: str, cache: Path) -> None:
    """Bring a file to ``blobs/`` in the cache folder of its repository, under the lock of all who want it.

    Does nothing where it is there, or where the hub does not call it by its SHA-256, as it does files of weights.

    Args:
        library: huggingface_hub.
        repository: ``<owner>/<name>``.
        name: of the file.
        revision: a branch, a tag or a commit.
        cache: folder of the repository in the cache.

    Raises:
        OSError: of the disk or the network; what was fetched is kept.
        Exception: of the library, which differ by its version.
    """
    from filelock import FileLock  # comes with the library

    about = library.get_hf_file_metadata(library.hf_hub_url(repository, name, revision=revision))
    etag, size = str(about.etag or ""), about.size
    blob = cache / "blobs" / etag
    if not SHA256.match(etag) or size is None or blob.exists():
        return
    blob.parent.mkdir(parents=True, exist_ok=True)
    part = blob.with_name(f"{etag}.part")
    with FileLock(str(blob.with_name(f"{etag}.lock"))):
        if blob.exists():
            return  # another process has fetched it meanwhile
        there = part.stat().st_size if part.exists() else 0
        _check_room(blob.parent, size - there)
        with _progress(f"{repository} {name}", size, there) as advance:
            _fill(library, about.location, part, size, advance)
        if sha256_of(part) != etag:
            part.unlink()
            raise OSError(errno.EIO, f"{name} was damaged on its way (its SHA-256 is another) and is removed")
        part.replace(blob)


def sha256_of(path: Path) -> str:
    """Of a file's content, in hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for block in iter(lambda: file.read(4 * _BLOCK), b""):
            digest.update(block)
    return digest.hexdigest()


def _fill(library: Any, url: str, part: Path, size: int, advance: Any) -> None:
    """Append what is missing; connections that break are made again as long as they bring something."""
    fruitless = 0
    while True:
        begin = part.stat().st_size if part.exists() else 0
        if begin >= size:
            return
        try:
            _append(library, url, part, begin, advance)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            cut_off = error
        except Exception as error:  # of the HTTP library, which is another in another version
            if getattr(getattr(error, "response", None), "status_code", None) is not None:
                raise
            cut_off = error  # type: ignore[assignment]
        else:
            cut_off = OSError(errno.ECONNRESET, "the connection ended early")
        now = part.stat().st_size if part.exists() else 0
        fruitless = 0 if now > begin else fruitless + 1
        if now < size and fruitless >= _ATTEMPTS:
            raise cut_off


def _append(library: Any, url: str, part: Path, begin: int, advance: Any) -> None:
    # A place that the hub redirects to has the permission in its address, and must not see the token.
    own = urlsplit(url).netloc == urlsplit(library.hf_hub_url("a/b", "c")).netloc
    headers = {**(library.utils.build_hf_headers() if own else {}), "Accept-Encoding": "identity"}
    if begin:
        headers["Range"] = f"bytes={begin}-"
    session = library.utils.get_session()
    with contextlib.ExitStack() as stack:
        if callable(getattr(session, "stream", None)):  # httpx, since 1.0 of the library; requests has a flag
            answer = stack.enter_context(session.stream("GET", url, headers=headers, follow_redirects=True))
            blocks = answer.iter_bytes
        else:
            answer = stack.enter_context(session.get(url, headers=headers, stream=True, timeout=_timeout()))
            blocks = answer.iter_content
        if answer.status_code == _BEYOND:
            part.unlink()
            return
        if answer.status_code not in (_OK, _PARTIAL):
            answer.raise_for_status()
        whole = answer.status_code == _OK  # it does not go on from anywhere: all comes again
        if whole and begin:
            advance(-begin)
        with part.open("wb" if whole else "ab") as file:
            for block in blocks(_BLOCK):
                file.write(block)
                advance(len(block))


def _timeout() -> float:
    from huggingface_hub.constants import HF_HUB_DOWNLOAD_TIMEOUT

    return float(HF_HUB_DOWNLOAD_TIMEOUT)


def _check_room(folder: Path, wanted: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < wanted:
        said = f"{wanted / 2**30:.1f} GiB are wanted, {free / 2**30:.1f} GiB are free"
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {said}")


@contextlib.contextmanager
def _progress(title: str, size: int, there: int) -> Iterator[Any]:
    """A bar on a terminal; gives what to call with the number of bytes that have come."""
    terminal = console.make_console()
    if not terminal.is_terminal:
        yield lambda _: None
        return
    from rich import progress

    console.waited()
    columns = (
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(),
        progress.DownloadColumn(binary_units=True),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=terminal) as bar:
        task = bar.add_task(f"fetching {title}", total=size, completed=there)
        yield lambda count: bar.advance(task, count)
