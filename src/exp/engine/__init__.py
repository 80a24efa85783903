"""The training engine, on any backend.

Importing this package imports MMEngine, which imports yapf. At its first import yapf writes a cache of its grammar to
the user's home folder, not atomically (``Grammar.dump`` of yapf 0.43). Another process that imports yapf at this
moment, such as the second job of a sweep, reads an incomplete pickle. So the import is tried again.
"""

import importlib
import pickle
import time

_TRIES = 100

for left in reversed(range(_TRIES)):
    try:
        importlib.import_module("mmengine")
        break
    except (EOFError, pickle.UnpicklingError):
        if not left:
            raise
        time.sleep(0.05)  # the file is complete within milliseconds, but visible later on a shared file system
