"""task=stats: what the training images hold, band by band, as a table and as a file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Mapping

import pandas as pd

from exp.engine.building import build_data, make_result, record_environment
from exp.errors import ConfigError
from exp.runs.files import write_json
from exp.vision.data.base import ImageData
from exp.vision.data.statistics import STATISTICS

if TYPE_CHECKING:
    from exp.session import Session

__all__ = ["lines_of", "write_statistics"]


def write_statistics(session: Session) -> dict[str, Any]:
    """Measure the training split, each rank its share of the images; rank 0 prints and writes ``statistics.json``.

    Values are those of the files, clipped to ``data.value_range`` where it is set.

    Raises:
        ConfigError: the data are no images.
        DataError: an image cannot be used.
    """
    config = session.config
    record_environment(session)
    data: Any = build_data(session)
    if not isinstance(data, ImageData):
        raise ConfigError(f"task=stats measures images, and data {config.data._target_} has none")
    data.normalization.look()
    session.begin()
    table = data.normalization.table(list(config.task.percentiles), session.distributed)
    if session.distributed.is_main:
        write_json(session.folder.path / STATISTICS, table)
    for line in lines_of(table):
        session.say(line)
    means = {f"mean_{name}": value for name, value in zip(table["bands"], table["mean"])}
    return make_result(
        session, {"images": table["images"], **means}, None, files=[STATISTICS], measured_on="train", published=None
    )


def lines_of(table: Mapping[str, Any]) -> list[str]:
    """The table as text: a line for each band."""
    shown = pd.DataFrame({"band": table["bands"], **{key: table[key] for key in ("mean", "std", "min", "max")}})
    for name, values in table["percentiles"].items():
        shown[f"{name} %"] = values
    both = zip(table["without_data"], table["values"])
    shown["no data"] = [f"{100 * lacking / (lacking + there):.2f} %" for lacking, there in both]
    clipped = "" if table["value_range"] is None else f", clipped to {table['value_range']}"
    head = f"{table['images']} training images, values of the files{clipped}"
    return [head, *shown.to_string(index=False, float_format="{:.6g}".format).splitlines()]
