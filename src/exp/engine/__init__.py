"""The training engine: MMEngine's Runner, on any backend."""

from exp.engine.mmengine_import import import_mmengine

import_mmengine()
