"""The training engine, on any backend.

Importing it imports MMEngine, which imports yapf, which keeps a cache of its grammar in the user's home. The first
process writes that file under its final name before the last bytes are there (``Grammar.dump`` of yapf 0.43). A process
that imports at that moment, such as one of a sweep's first two jobs, reads half a pickle: it tries again.
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
        time.sleep(0.05)  # the file is whole within milliseconds; a shared file system may take longer to show it
