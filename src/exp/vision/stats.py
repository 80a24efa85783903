"""task=stats: what the training images hold, band by band, as a table and as a file that ``data.mean`` takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Mapping

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

    Values are those of the files, clipped to ``data.value_range`` or ``data.stretch`` where one of them is set.

    Raises:
        ConfigError: the data are no images, or a percentile is none.
        DataError: an image cannot be used.
    """
    config = session.config
    percentiles = list(config.task.percentiles)
    if any(not 0.0 <= percent <= 100.0 for percent in percentiles):
        raise ConfigError(f"task.percentiles={percentiles} must be from 0 to 100")
    record_environment(session)
    data: Any = build_data(session)
    if not isinstance(data, ImageData):
        raise ConfigError(f"task=stats measures images, and data {config.data._target_} has none")
    data.normalization.look()
    session.begin()
    table = data.normalization.table(percentiles, session.distributed)
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
    columns = {"band": table["bands"], **{key: table[key] for key in ("mean", "std", "min", "max")}}
    columns.update({f"{name} %": values for name, values in table["percentiles"].items()})
    total = [values + lacking for values, lacking in zip(table["values"], table["without_data"])]
    columns["no data"] = [f"{100 * lacking / all_:.2f} %" for lacking, all_ in zip(table["without_data"], total)]
    cells = [[each if isinstance(each, str) else f"{each:.6g}" for each in values] for values in columns.values()]
    widths = [max(len(title), *map(len, column)) for title, column in zip(columns, cells)]
    rows = [list(columns), *map(list, zip(*cells))]
    clipped = "" if table["value_range"] is None else f", clipped to {table['value_range']}"
    head = f"{table['images']} training images, values {table['units']}{clipped}"
    return [head, *("  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows)]
