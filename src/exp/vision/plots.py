"""Figures of images: panels with titles and a legend, contact sheets, confusion matrices, and the plots of a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Sequence

import numpy as np
import torch
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter

from exp.draw.figure import label, literal_text, new_figure, render_pixels
from exp.engine.evaluate import batch_outputs
from exp.vision.metrics import labels_at_mask_size
from exp.vision.rendering import (
    Color,
    colorize,
    enlarge,
    overlay_labels,
    resize_labels,
    shrink,
    to_rgb,
    value_labels,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from exp.data.extensions import RankedSample
    from exp.draw.figure import Picture
    from exp.session import Session

__all__ = ["ScenePrediction", "Tile", "contact_sheet", "draw_confusion_matrix", "draw_images", "draw_overlay",
           "draw_samples", "draw_scene_tile", "evenly_spaced", "panels"]  # fmt: skip

_DPI = 128  # a power of two: sizes in pixels are exact
_GAP = 8  # pixels between pictures side by side
_LEAST = 640  # pixels of the longer side that a legend needs to be readable
_NUMBERS_UP_TO = 25  # classes of a confusion matrix; more leave no room for numbers
_OVERLAYS, _SCENES = 4, 24  # plots of a training: validation images with labels; scenes on the sheet
_PANEL = 768  # pixels of the longer side of an image beside its labels
_RIGHT, _WRONG = "#2ea043", "#d62728"


def panels(
    pictures: Sequence[np.ndarray],
    titles: Sequence[str] = (),
    legend: Sequence[tuple[str, Color]] = (),
) -> np.ndarray:
    """Place pictures side by side, at their original resolution.

    Args:
        pictures: RGB (H, W, 3), uint8, of one size.
        titles: one above each picture; empty: none.
        legend: names and their colors, below the pictures.

    Returns:
        RGB on white, uint8.
    """
    height, width = pictures[0].shape[:2]
    across = len(pictures) * (width + _GAP) - _GAP
    letters = min(max(width // 28 if titles else across // 55, 13), 48)
    line = round(1.8 * letters)
    names = [label(_shortened(name, across, letters)) for name, _ in legend]
    columns = max(min(int(across / (0.65 * letters * max(map(len, names), default=1) + 3 * letters)), len(names)), 1)
    below = line * -(-len(names) // columns)
    total = height + line * bool(titles) + below
    figure, size = new_figure(across / _DPI, total / _DPI, _DPI), letters * 72 / _DPI
    for number, picture in enumerate(pictures):
        rectangle = (number * (width + _GAP) / across, below / total, width / across, height / total)
        axes = figure.add_axes(rectangle, frameon=False, xticks=[], yticks=[])
        axes.imshow(picture, interpolation="none", aspect="auto")
        if titles:
            literal_text(axes.set_title(_shortened(titles[number], width, letters), fontsize=size, pad=0.4 * size))
    if names:
        colors = ["#{:02x}{:02x}{:02x}".format(*color) for _, color in legend]
        patches = [Patch(color=color, label=name) for name, color in zip(names, colors)]
        drawn = figure.legend(patches, names, loc="lower left", bbox_to_anchor=(0.0, 0.0), ncol=columns, fontsize=size,
                              frameon=False, borderaxespad=0.2, borderpad=0.1, labelspacing=0.4)  # fmt: skip
        for text in drawn.get_texts():
            literal_text(text)
    return render_pixels(figure)


def _shortened(text: str, width: int, letters: int) -> str:
    """Shorten a text to a width, with an ellipsis in its middle, since file names differ at their ends.

    Args:
        text: one line.
        width: in pixels.
        letters: font size in pixels.
    """
    room = max(int(width / (0.62 * letters)), 3)
    head = (room - 1) // 3
    return text if len(text) <= room else f"{text[:head]}…{text[len(text) - (room - 1 - head) :]}"


def draw_overlay(picture: np.ndarray, labels: np.ndarray, names: Sequence[str], palette: Sequence[Color]) -> np.ndarray:
    """:func:`overlay_labels` with a legend below; small images are enlarged.

    Args:
        picture: RGB (H, W, 3), uint8.
        labels: (H, W), uint8.
        names: of the classes, as the legend shows them.
        palette: their colors.

    Returns:
        RGB, uint8.
    """
    mixed = overlay_labels(enlarge(picture, _LEAST), enlarge(labels, _LEAST), palette)
    return panels([mixed], legend=list(zip(names, palette)))


class Tile(NamedTuple):
    """One picture of a sheet.

    Attributes:
        picture: RGB (H, W, 3), uint8, any size.
        captions: lines below the picture.
        frame: color of a frame around it; None: no frame.
    """

    picture: np.ndarray
    captions: Sequence[str]
    frame: str | None = None


def contact_sheet(tiles: Sequence[Tile], side: int = 224, title: str = "") -> np.ndarray:
    """Place pictures in rows: a contact sheet.

    Args:
        tiles: at least one.
        side: pixels of the longer side of each picture.
        title: a line above the sheet; may be empty.

    Returns:
        RGB on white, uint8.
    """
    columns = min(max(round((1.6 * len(tiles)) ** 0.5), min(len(tiles), 3)), len(tiles))
    rows = -(-len(tiles) // columns)
    flat = max(tile.picture.shape[0] / max(tile.picture.shape[:2]) for tile in tiles)
    captions = 18 * max(len(tile.captions) for tile in tiles)
    width, height = columns * (side + 16) + 40, rows * (flat * side + captions + 20) + 40 + 30 * bool(title)
    figure = new_figure(width / _DPI, round(height) / _DPI, _DPI)
    for axes, tile in zip(figure.subplots(rows, columns, squeeze=False).flat, tiles):
        axes.imshow(tile.picture, interpolation="none")
        for spine in axes.spines.values():
            spine.set(visible=tile.frame is not None, color=tile.frame, linewidth=3)
        text = "\n".join(_shortened(line, side, 12) for line in tile.captions)
        literal_text(axes.set_xlabel(text, fontsize=12 * 72 / _DPI))
    for axes in figure.axes:
        axes.set(xticks=[], yticks=[], frame_on=axes.has_data())
    if title:
        literal_text(figure.suptitle(_shortened(title, width, 14), fontsize=14 * 72 / _DPI))
    return render_pixels(figure)


def evenly_spaced(count: int, max_count: int) -> list[int]:
    """At most ``max_count`` numbers below ``count``, evenly spaced from the first to the last."""
    if count <= max_count:
        return list(range(count))
    return [round(step * (count - 1) / max(max_count - 1, 1)) for step in range(max_count)]


class ScenePrediction(NamedTuple):
    """The prediction for one image.

    Attributes:
        file: path of the image.
        best: the most probable classes, as (class, probability), in descending order.
        truth: true class; None: not known.
    """

    file: str
    best: Sequence[tuple[str, float]]
    truth: str | None = None


def draw_scene_tile(picture: np.ndarray, scene: ScenePrediction) -> Tile:
    """A picture with its predicted class; if the truth is known, it is named, and the frame is green or red."""
    name, share = scene.best[0]
    captions = [f"{name}  {100 * share:.0f} %"]
    if scene.truth is None:
        return Tile(picture, [*captions, scene.file.rsplit("/", 1)[-1]])
    right = scene.truth == name
    return Tile(picture, [*captions, "right" if right else f"is {scene.truth}"], _RIGHT if right else _WRONG)


def draw_confusion_matrix(counts: np.ndarray, classes: Sequence[str], title: str) -> Figure:
    """Draw a confusion matrix: rows are the truth, columns the prediction; colors are shares of a row.

    Args:
        counts: int64 (K, K).
        classes: their names.
        title: above the figure.
    """
    count, numbers = len(classes), len(classes) <= _NUMBERS_UP_TO
    letters = 9 if numbers else 6
    side = max(count * (0.52 if numbers else 0.24), 2.5) + max(map(len, classes)) * letters * 0.6 / 72 + 1.0
    figure = new_figure(side, side)
    axes = figure.add_subplot()
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    axes.imshow(shares, cmap="Blues", vmin=0.0, vmax=1.0)
    axes.set(xlabel="prediction", ylabel="truth", xticks=range(count), yticks=range(count))
    axes.set_title(title, fontsize=11)
    axes.set_xticklabels(classes, rotation=60, ha="right", rotation_mode="anchor", fontsize=letters)
    axes.set_yticklabels(classes, fontsize=letters)
    for tick in (*axes.get_xticklabels(), *axes.get_yticklabels()):
        literal_text(tick)
    shortly = EngFormatter(places=0, sep="")  # 12345 as 12k
    for row, column in zip(*np.nonzero(counts)) if numbers else ():
        color = "white" if shares[row, column] > 0.55 else "0.15"
        text = shortly(counts[row, column])
        axes.text(column, row, text, ha="center", va="center", color=color, fontsize=9 if counts.max() < 1000 else 7)
    return figure


def draw_images(session: Session, data: Any, model: Any, metrics: Any = None) -> dict[str, Picture]:
    """Plot predictions of the best weights for some validation images.

    Segmentation: ``val_<n>.png`` with image, truth and prediction. Scenes: ``val.png``, a contact sheet. Both:
    ``confusion.png``. The images are evenly spaced over the split.

    Args:
        session: the session.
        data: the data set.
        model: wrapped or not, on the session's device; it is set to eval mode.
        metrics: metrics of classes after ``compute``, for the confusion matrix; None: no confusion matrix.

    Returns:
        Plots by the names of PNG files.
    """
    pictures: dict[str, Picture] = {}
    if data.val[torch.zeros(1, dtype=torch.int64)]["label"].dim() == 3:
        unit = "pixels"
        for number, index in enumerate(evenly_spaced(len(data.val), _OVERLAYS)):
            predicted = batch_outputs(session, model, data.val[torch.tensor([index])])[0]
            pictures[f"val_{number}.png"] = _segmentation_picture(data, data.val, index, predicted)
    else:
        unit, tiles = "images", []
        numbers = evenly_spaced(len(data.val), _SCENES)
        for begin in range(0, len(numbers), data.eval_batch_size):
            batch = data.val[torch.tensor(numbers[begin : begin + data.eval_batch_size])]
            logits = batch_outputs(session, model, batch)
            labeled_rows = [row for row, label in enumerate(batch["label"].tolist()) if label >= 0]
            tiles += [_scene(data, batch, logits[row], row) for row in labeled_rows]
        pictures["val.png"] = contact_sheet(tiles, title=f"{len(tiles)} of {len(data.val)} validation images")
    if metrics is not None:
        matrix = metrics.confusion.counts.numpy()
        pictures["confusion.png"] = draw_confusion_matrix(matrix, data.classes, f"{int(matrix.sum()):,} {unit}")
    return pictures


def draw_samples(data: Any, worst: Sequence[RankedSample], best: Sequence[RankedSample]) -> dict[str, Picture]:
    """Plot truth and prediction of some test images.

    Args:
        data: the data set.
        worst: the images with the worst predictions, the worst first.
        best: the images with the best predictions, the best first.

    Returns:
        Plots by file name. Segmentation: ``worst_<n>.png`` and ``best_<n>.png``, from 1; scenes: the contact sheets
        ``worst.png`` and ``best.png``.
    """
    pictures: dict[str, Picture] = {}
    for kind, samples in (("worst", worst), ("best", best)):
        tiles = []
        for position, sample in enumerate(samples, start=1):
            name = Path(data.test.samples[sample.number][0]).name
            if sample.outputs.dim() > 1:
                title = f"{kind} {position}: {name}"
                picture = _segmentation_picture(data, data.test, sample.number, sample.outputs, title)
                pictures[f"{kind}_{position}.png"] = picture
                continue
            tile = _scene(data, data.test[torch.tensor([sample.number])], sample.outputs)
            tiles.append(tile._replace(captions=[*tile.captions, f"{100 * sample.value:.0f} % for its class", name]))
        if tiles:
            title = f"the {len(tiles)} {kind} of {len(data.test)} images, by the probability of their class"
            pictures[f"{kind}.png"] = contact_sheet(tiles, title=title)
    return pictures


def _scene(data: Any, batch: Any, logits: torch.Tensor, row: int = 0) -> Tile:
    """A tile of one image of a batch, with its most probable class and the truth."""
    share, best = torch.softmax(logits.float(), dim=-1).max(dim=-1)
    scene = ScenePrediction("", [(data.classes[int(best)], float(share))], data.classes[int(batch["label"][row])])
    return draw_scene_tile(to_rgb(shrink(batch["image"][row].permute(1, 2, 0).numpy(), 512)), scene)


def _segmentation_picture(
    data: Any, split: Any, index: int, predicted: torch.Tensor, title: str = "image"
) -> np.ndarray:
    """Image, truth and prediction side by side, with a legend."""
    batch = split[torch.tensor([index])]
    height, width = batch["sizes"][0] if "sizes" in batch else batch["label"].shape[-2:]
    rows, columns = batch["label_sizes"][0] if "label_sizes" in batch else (height, width)
    truth = batch["label"][0, :rows, :columns].numpy()
    picture = enlarge(shrink(to_rgb(batch["image"][0, :, :height, :width].permute(1, 2, 0).numpy()), _PANEL), 384)
    if data.learns_classes:
        labels = labels_at_mask_size(predicted[None], batch)[0].numpy()[:rows, :columns]
        is_valid = truth != data.ignore_index
        agreement = f", {100 * (labels == truth)[is_valid].mean():.1f} % of the pixels right" if is_valid.any() else ""
    else:
        values = predicted.numpy()[:rows, :columns]
        is_valid = np.isfinite(truth)
        agreement = f", MAE {np.abs(values - truth)[is_valid].mean():.3g} {data.unit}" if is_valid.any() else ""
        truth, labels = (value_labels(part, data.target_range) for part in (truth, values))
    return panels(
        [
            picture,
            *(colorize(resize_labels(label_map, *picture.shape[:2]), data.palette) for label_map in (truth, labels)),
        ],
        [title, "truth (black: does not count)", f"prediction{agreement}"],
        data.legend,
    )
