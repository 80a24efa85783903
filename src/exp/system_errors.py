"""What the machine refuses - space, memory, permission, a library -, as one line that says where and what to do."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from exp.errors import ConfigError, ExpError, RunError, UnavailableError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["as_ours"]

_PLUGINS = "TORCH_DEVICE_BACKEND_AUTOLOAD"  # torch's own message names it, but not what went wrong
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FORBIDDEN = (
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP,
)  # fmt: skip


def as_ours(error: BaseException, folder: Path | None = None, usage: bool = False) -> ExpError | None:
    """The error as one of ours.

    Args:
        error: any.
        folder: what was being written where the error itself does not say.
        usage: whether it comes before anything has started: then a path that cannot be used is a wrong argument.

    Returns:
        None for an error that is not the machine's.
    """
    if isinstance(error, ExpError):
        return error
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        said = f" ({error})" if str(error) else ""
        return RunError(
            f"the machine's memory, or the limit on it, is exhausted{said}; lower batch_size or data.num_workers, or "
            "raise the limit (ulimit -v, launcher.mem_gib)"
        )
    if isinstance(error, (OSError, ImportError)) and ".so" in str(error) and getattr(error, "errno", None) is None:
        return UnavailableError(
            f"a library does not load: {str(error).splitlines()[0]}; is it installed, and is there enough memory for "
            "it (ulimit -v)?"
        )
    if isinstance(error, RuntimeError) and _PLUGINS in str(error):
        return UnavailableError(
            f"torch loads a device's plug-in, which fails: {error.__cause__ or error}; export {_PLUGINS}=0, or put the "
            "plug-in's runtime on LD_LIBRARY_PATH"
        )
    if not isinstance(error, OSError) or error.errno is None:
        return None
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return RunError("too many files are open; raise the limit (ulimit -n), or lower data.num_workers")
    place = error.filename if error.filename is not None else folder
    where = f"{place}: {error.strerror}" if place is not None else str(error.strerror)
    if error.errno in _FULL:
        return RunError(f"cannot write {where}; make space, or set output_dir, and go on with resume=auto")
    if error.errno in _FORBIDDEN or usage:
        kind = ConfigError if usage else RunError
        return kind(f"cannot use {where}; correct the path (such as output_dir), or its permissions")
    return None
