"""The file of statistics that ``task=stats`` and trainings leave. Imports no numpy: the parent reads it, too."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from exp.errors import DataError

__all__ = ["STATISTICS", "read_statistics"]

STATISTICS = "statistics.json"
"""Its name in a run folder."""


def read_statistics(key: str, path: Path) -> dict[str, Any]:
    """Mean and standard deviation of each band, and what else a file says.

    Args:
        key: what names the file, for messages.
        path: of the file, or of the run folder that it lies in.

    Raises:
        DataError: there is no such file, or it holds no such lists.
    """
    file = path / STATISTICS if path.is_dir() else path
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(
            f"{key}: {file} cannot be read as JSON ({str(error).splitlines()[0]}); task=stats writes {STATISTICS}"
        ) from error
    lists = [content.get(name) if isinstance(content, dict) else None for name in ("mean", "std")]
    numbers = all(isinstance(each, list) and each and all(map(_is_number, each)) for each in lists)
    if not numbers and not (path.is_dir() and isinstance(content, dict) and "value_range" in content):
        raise DataError(f'{key}: {file} holds no numbers by band; expected {{"mean": [...], "std": [...]}}')
    return dict(content)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)
