"""Pictures of a training or an evaluation of images that has ended."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Sequence

import numpy as np
import torch

from exp.engine.outputs import batch_outputs
from exp.engine.wrapper import unwrapped
from exp.vision.figures import Scene, Tile, confusion_figure, panels, scene_tile, sheet, spread
from exp.vision.metrics import as_in_file
from exp.vision.pictures import colored, enlarged, resized_labels, shrunk, to_rgb

if TYPE_CHECKING:
    from exp.draw.figure import Picture
    from exp.engine.outputs import RankedSample
    from exp.session import Session

__all__ = ["draw_images", "draw_samples"]

_OVERLAYS = 4
_PANEL = 768  # pixels of the longer side of an image beside its labels
_SHEET = 24  # scenes


def draw_images(session: Session, data: Any, model: Any, metrics: Any = None) -> dict[str, Picture]:
    """Predictions of the best weights for some validation images.

    Segmentation: ``val_<n>.png``, image, truth and prediction of images spread over the split. Scenes: ``val.png``, a
    sheet of them. Both: ``confusion.png``.

    Args:
        session: the session.
        data: the data set.
        model: wrapped or not, on the session's device; is left in eval mode.
        metrics: after its ``compute``, to draw its confusion matrix; None: there is none to draw.

    Returns:
        Pictures by the names of PNG files.
    """
    model = unwrapped(model)
    model.eval()
    pictures: dict[str, Picture] = {}
    if data.val[torch.zeros(1, dtype=torch.int64)]["label"].dim() == 3:
        unit = "pixels"
        for number, index in enumerate(spread(len(data.val), _OVERLAYS)):
            predicted = batch_outputs(session, model, data.val[torch.tensor([index])])[0]
            pictures[f"val_{number}.png"] = _segmentation_picture(data, data.val, index, predicted)
    else:
        unit, tiles = "images", []
        numbers = spread(len(data.val), _SHEET)
        for begin in range(0, len(numbers), data.eval_batch_size):
            batch = data.val[torch.tensor(numbers[begin : begin + data.eval_batch_size])]
            logits = batch_outputs(session, model, batch)
            known = [row for row, label in enumerate(batch["label"].tolist()) if label >= 0]
            tiles += [_scene(data, batch, logits[row], row) for row in known]
        pictures["val.png"] = sheet(tiles, title=f"{len(tiles)} of {len(data.val)} validation images")
    if metrics is not None:
        matrix = metrics.confusion.counts.numpy()
        pictures["confusion.png"] = confusion_figure(matrix, data.classes, f"{int(matrix.sum()):,} {unit}")
    return pictures


def draw_samples(data: Any, worst: Sequence[RankedSample], best: Sequence[RankedSample]) -> dict[str, Picture]:
    """Truth beside prediction, of images of the test split.

    Args:
        data: the data set.
        worst: those that the model does worst, the worst first.
        best: likewise.

    Returns:
        Segmentation: ``worst_<n>.png`` and ``best_<n>.png``, from 1; scenes: ``worst.png`` and ``best.png``, sheets.
    """
    pictures: dict[str, Picture] = {}
    for kind, samples in (("worst", worst), ("best", best)):
        tiles = []
        for place, sample in enumerate(samples, start=1):
            name = Path(data.test.samples[sample.number][0]).name
            if sample.outputs.dim() == 2:
                title = f"{kind} {place}: {name}"
                picture = _segmentation_picture(data, data.test, sample.number, sample.outputs, title)
                pictures[f"{kind}_{place}.png"] = picture
                continue
            tile = _scene(data, data.test[torch.tensor([sample.number])], sample.outputs)
            tiles.append(tile._replace(captions=[*tile.captions, f"{100 * sample.value:.0f} % for its class", name]))
        if tiles:
            title = f"the {len(tiles)} {kind} of {len(data.test)} images, by the probability of their class"
            pictures[f"{kind}.png"] = sheet(tiles, title=title)
    return pictures


def _scene(data: Any, batch: Any, logits: torch.Tensor, row: int = 0) -> Tile:
    """An image of a batch with its likeliest class, and the truth."""
    share, best = torch.softmax(logits.float(), dim=-1).max(dim=-1)
    scene = Scene("", [(data.classes[int(best)], float(share))], data.classes[int(batch["label"][row])])
    return scene_tile(to_rgb(shrunk(batch["image"][row].permute(1, 2, 0).numpy(), 512)), scene)


def _segmentation_picture(
    data: Any, split: Any, index: int, predicted: torch.Tensor, title: str = "image"
) -> np.ndarray:
    """Image, truth and prediction side by side, with a legend."""
    batch = split[torch.tensor([index])]
    height, width = batch["sizes"][0] if "sizes" in batch else batch["label"].shape[-2:]
    rows, columns = batch["label_sizes"][0] if "label_sizes" in batch else (height, width)
    labels = as_in_file(predicted[None], batch)[0].numpy()[:rows, :columns]
    truth = batch["label"][0, :rows, :columns].numpy()
    picture = enlarged(shrunk(to_rgb(batch["image"][0, :, :height, :width].permute(1, 2, 0).numpy()), _PANEL), 384)
    known = truth != data.ignore_index
    right = f", {100 * (labels == truth)[known].mean():.1f} % of the pixels right" if known.any() else ""
    return panels(
        [picture, *(colored(resized_labels(each, *picture.shape[:2]), data.palette) for each in (truth, labels))],
        [title, "truth (black: does not count)", f"prediction{right}"],
        list(zip(data.classes, data.palette)),
    )
