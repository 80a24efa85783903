"""Draws the pictures of the pages again: ``python docs/make_pictures.py --runs outputs/pictures``.

An experiment on bundled data is trained, or taken from ``--runs`` where it is there already: some ten minutes on two
cores. Of its plots, scaled, ``forecast.png`` is that of the window whose error is the median of many; ``map.png`` is a
scene of the validation split, predicted with bundled weights. ``run.svg`` shows a run and what can be added to it, and
``packages.svg`` the packages of the source, from what they import; neither needs training.
"""

from __future__ import annotations

import argparse
import ast
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

import pandas as pd
from PIL import Image

import exp

PICTURES = Path(__file__).parent / "pictures"
WIDTH = 1100  # of the plots, in pixels
COLORS = 224  # a palette: a third of the bytes
PANEL = 720  # pixels of the longer side of the scene
CLASSES = ("building", "land", "road", "vegetation", "water")  # of Dubai
WINDOWS, CHANNEL = 41, "HUFL"  # windows spread over the test split, of which one is drawn


class Box(NamedTuple):
    """One of the diagram's boxes.

    Attributes:
        x: left side, in the diagram's units.
        y: upper side.
        width: 70 high.
        title: what it is.
        lines: what happens there, two lines at most.
        open: can be brought from outside.
    """

    x: int
    y: int
    width: int
    title: str
    lines: tuple[str, ...]
    open: bool = False


BOXES = (
    Box(20, 46, 200, "command line", ("python -m exp", "experiment=... nproc=8")),
    Box(260, 46, 220, "configuration", ("composed, typed, checked,", "then frozen: config.yaml")),
    Box(520, 46, 200, "Launcher", ("local, torchrun, submitit,", "external"), open=True),
    Box(760, 46, 220, "supervision", ("who failed first, who hangs,", "no process left behind")),
    Box(20, 186, 150, "Backend", ("device, process group,", "precision, kernels"), open=True),
    Box(190, 186, 150, "Data", ("same order on any", "number of ranks"), open=True),
    Box(360, 186, 150, "Model", ("forward(batch, mode)", ""), open=True),
    Box(530, 186, 150, "Wrapper", ("mmddp, ddp, fsdp,", "none"), open=True),
    Box(700, 186, 150, "Task", ("train, eval, predict,", "doctor, parity, ..."), open=True),
    Box(870, 186, 110, "Metric", ("exact over", "ranks"), open=True),
    Box(20, 326, 300, "checkpoints", ("plain data; goes on bit for bit,", "or with another number of ranks")),
    Box(
        345,
        326,
        300,
        "result.json, metrics.jsonl, plots",
        ("what came out, and on what cards;", "tables and report.html of many runs"),
    ),
    Box(670, 326, 310, "Logger", ("TensorBoard, MLflow, W&B, SwanLab", ""), open=True),
)
BANDS = (
    (34, "parent: composes without torch, holds no device"),
    (174, "each rank: one device"),
    (314, "one run folder"),
)
ARROWS = ((220, 81, 260, 81), (480, 81, 520, 81), (720, 81, 760, 81), (500, 130, 500, 174), (500, 270, 500, 314))


def diagram() -> str:
    """The SVG of a run: three bands of boxes; blue ones are interfaces."""
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1000 416" font-family="sans-serif">',
        '<rect width="1000" height="416" fill="#ffffff"/>',
        '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L10 5L0 10z" fill="#555555"/></marker></defs>',
    ]
    for y, text in BANDS:
        parts.append(f'<rect x="8" y="{y - 14}" width="984" height="110" rx="8" fill="#f2f4f6"/>')
        parts.append(f'<text x="20" y="{y + 4}" font-size="13" fill="#555555">{escape(text)}</text>')
    for x1, y1, x2, y2 in ARROWS:
        parts.append(f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="#555555" marker-end="url(#tip)"/>')
    for box in BOXES:
        fill, stroke = ("#dcebfa", "#2f6fae") if box.open else ("#ffffff", "#999999")
        middle = box.x + box.width / 2
        parts.append(
            f'<rect x="{box.x}" y="{box.y}" width="{box.width}" height="70" rx="6" fill="{fill}" stroke="{stroke}"/>'
        )
        for offset, text in zip((20, 40, 57), (box.title, *box.lines)):
            style = 'font-size="15" font-weight="bold"' if offset == 20 else 'font-size="12"'
            place = f'x="{middle:g}" y="{box.y + offset}" text-anchor="middle"'
            parts.append(f'<text {place} {style} fill="#222222">{escape(text)}</text>')
    parts.append(
        '<text x="980" y="14" text-anchor="end" font-size="12" fill="#2f6fae">blue: can be brought from outside</text>'
    )
    return "\n".join([*parts, "</svg>", ""])


def layers() -> list[list[str]]:
    """Packages and modules of ``src/exp`` by layer, highest first, as ``docs/concepts/architecture.md`` has them."""
    page = (Path(__file__).parent / "concepts" / "architecture.md").read_text(encoding="utf-8")
    line = page.partition("Layers: ")[2].partition("\n")[0].rpartition(" < __main__")[0]
    return [[name.strip() for name in layer.split(",")] for layer in line.split("<")][::-1]


_ROW_HEIGHT, _LEFT, _BOX = 56, 20, 150


def imports_of(package: Path) -> set[str]:
    """The packages of exp that a package or module imports, also for typing and inside functions."""
    imported: set[str] = set()
    for file in package.rglob("*.py") if package.is_dir() else [package.with_suffix(".py")]:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("exp"):
                in_package = "." in str(node.module)
                imported |= {str(node.module).split(".")[1]} if in_package else {alias.name for alias in node.names}
    return imported - {package.name}


def packages() -> str:
    """The SVG of the packages, a row for each layer; an arrow leads to what is imported, a red one against the rows."""
    rows = layers()
    place = {name: (row, column) for row, names in enumerate(rows) for column, name in enumerate(names)}
    width, height = _LEFT + 4 * (_BOX + 12), len(rows) * _ROW_HEIGHT + 12
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    arrows = []
    for name, (row, column) in place.items():
        y, x = 10 + row * _ROW_HEIGHT, _LEFT + column * (_BOX + 12)
        parts.append(f'<rect x="{x}" y="{y}" width="{_BOX}" height="34" rx="6" fill="#dcebfa" stroke="#2f6fae"/>')
        parts.append(
            f'<text x="{x + _BOX / 2:g}" y="{y + 22}" text-anchor="middle" font-size="14" fill="#222222">{name}</text>'
        )
        for other in sorted(imports_of(Path(exp.__file__).parent / name) & place.keys()):
            below, beside = place[other]
            if below == row:
                continue
            up = below < row
            ends = y if up else y + 34, 10 + below * _ROW_HEIGHT + (34 if up else 0)
            x1, x2 = x + 20 + 110 * (beside + 1) / 6, _LEFT + beside * (_BOX + 12) + 20 + 110 * (column + 1) / 6
            # Those that skip a row, as most do, are faint: the picture is of the neighbors.
            color, faint = ("#c0392b", 0.9) if up else ("#555555", 0.55 if below == row + 1 else 0.13)
            arrows.append(
                f'<line x1="{x1:.0f}" y1="{ends[0]}" x2="{x2:.0f}" y2="{ends[1]}" stroke="{color}" opacity="{faint}"/>'
            )
    return "\n".join([*parts[:2], *arrows, *parts[2:], "</svg>", ""])


def trained(folder: Path, *overrides: str) -> Path:
    """The run in ``folder``, which is made where it is not there."""
    if not (folder / "result.json").exists():
        exp.run([*overrides, f"output_dir={folder}"])
    return folder


def median_window(run: Path) -> Path:
    """The plot of the window whose squared error is the median of all windows in a run of task=predict."""
    errors = {}
    for path in (run / "forecasts").glob("window_*.csv"):
        table = pd.read_csv(path)
        errors[path.stem] = float(((table[CHANNEL] - table[f"{CHANNEL}_truth"]) ** 2).mean())
    name = sorted(errors, key=lambda name: errors[name])[len(errors) // 2]
    return next((run / "plots").glob(f"{name}*.png"))


def scaled(path: Path) -> Image.Image:
    """A picture, ``WIDTH`` wide, in colors of a palette."""
    picture = Image.open(path).convert("RGB")
    picture = picture.resize((WIDTH, round(picture.height * WIDTH / picture.width)), Image.Resampling.LANCZOS)
    return picture.quantize(COLORS, dither=Image.Dither.NONE)


def draw_map(folder: Path) -> Path:
    """Draw a scene, its map and its margins; the prediction is made where it is not there."""
    import numpy as np
    import rasterio
    from rasterio.enums import Resampling

    from exp.vision.plots import panels
    from exp.vision.rendering import colorize, resize_labels, shrink

    data = Path(__file__).parents[1] / "data"
    tile = data / "dubai" / "tile5" / "images" / "image_part_008.jpg"
    trained(
        folder, "task=predict", "experiment=dinov3_dubai", f"init_from={data / 'dubai_teacher' / 'best.pth'}",
        f"task.input={tile}", "model.blend=hann", "task.confidence=true",
    )  # fmt: skip
    labels = Image.open(folder / "predictions" / "classes" / f"{tile.stem}.png")
    image = shrink(np.asarray(Image.open(tile).convert("RGB")), PANEL)
    numbers = resize_labels(np.asarray(labels), *image.shape[:2])
    palette = [tuple(color) for color in np.reshape(labels.getpalette()[: 3 * len(CLASSES)], (-1, 3)).tolist()]
    with rasterio.open(folder / "predictions" / "confidence" / f"{tile.stem}.tif") as file:
        margin = file.read(1, out_shape=image.shape[:2], resampling=Resampling.average) * file.scales[0]
    gray = np.repeat((255 * margin).astype(np.uint8)[..., None], 3, axis=2)
    titles = [
        "a scene that the model has not seen",
        "its map, from blended windows",
        "margin: dark where classes compete",
    ]
    page = panels([image, colorize(numbers, palette), gray], titles, list(zip(CLASSES, palette)))
    Image.fromarray(page).save(folder / "map.png")
    return folder / "map.png"


def main() -> None:
    """Write the diagrams, and the plots where ``--runs`` says where the runs are or go."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, help="folder of the runs; without it the diagram alone is drawn")
    folder = parser.parse_args().runs
    PICTURES.mkdir(exist_ok=True)
    (PICTURES / "run.svg").write_text(diagram(), encoding="utf-8")
    (PICTURES / "packages.svg").write_text(packages(), encoding="utf-8")
    if folder is not None:
        series = trained(folder / "small", "max_epochs=1")
        options = f"task.num_windows={WINDOWS}", f"task.channels=[{CHANNEL}]", "task.intervals=[0.8,0.95]"
        forecast = trained(folder / "forecast", "task=predict", f"init_from={series}", *options)
        scaled(median_window(forecast)).save(PICTURES / "forecast.png", optimize=True)
        scaled(draw_map(folder / "map")).save(PICTURES / "map.png", optimize=True)


if __name__ == "__main__":
    main()
