"""The training engine, on any backend.

Importing it imports MMEngine, which may have to wait for another process that does so for the first time here:
MMEngine imports yapf, and yapf keeps its grammar in the user's cache: whoever comes first writes it, and renames the
file to its final name *before* its last bytes are written (``Grammar.dump`` of yapf 0.43). A process that comes in that
moment reads half a pickle. That is a sweep's first two jobs, or the first job of several nodes with one home folder.
"""

from __future__ import annotations

import importlib
import pickle
import time

from exp.errors import ConfigError

_PATIENCE_S = 5.0  # the file is whole within milliseconds; a shared file system may take longer to show it
_HALF_A_PICKLE = (EOFError, pickle.UnpicklingError)


def _import_mmengine() -> None:
    """Import ``mmengine``; half a cache of yapf is waited for.

    Raises:
        ConfigError: the cache stays as it is, since the process that wrote it was killed, for instance.
    """
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            importlib.import_module("mmengine")
            return
        except _HALF_A_PICKLE as error:
            if time.monotonic() > deadline:
                raise ConfigError(
                    "the cache of yapf, which MMEngine imports, is damaged: remove the folder YAPF in your cache "
                    f"(~/.cache, or $XDG_CACHE_HOME)\n  {type(error).__name__}: {error}"
                ) from error
        time.sleep(0.05)


_import_mmengine()
