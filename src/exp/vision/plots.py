"""Pictures of a training or an evaluation of images that has ended."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Sequence

import torch

from exp.engine.outputs import batch_outputs
from exp.engine.wrapper import unwrapped

if TYPE_CHECKING:
    import numpy as np

    from exp.draw.files import Picture
    from exp.engine.extremes import RankedSample
    from exp.session import Session

__all__ = ["draw_images", "draw_samples"]

_OVERLAYS = 4
_PANEL = 768  # pixels of the longer side of an image beside its labels
_SHEET = 24  # scenes
_COUNTED = 256  # scenes of a confusion matrix that is made here


def draw_images(session: Session, data: Any, model: Any, metrics: Any = None) -> dict[str, Picture]:
    """What the best weights say about some validation images.

    Segmentation: ``val_<n>.png``, image, truth and prediction of images spread over the part. Scenes: ``val.png``, a
    sheet of them. Both: ``confusion.png``.

    Args:
        session: the session.
        data: the data set.
        model: wrapped or not, on the session's device; is left in eval mode.
        metrics: an accumulator of ``data.metrics()`` after its ``compute``, whose confusion matrix is drawn; None: for
            scenes a matrix of at most 256 validation images is made.

    Returns:
        Pictures by the names of PNG files.
    """
    from exp.vision.draw.confusion import confusion_figure
    from exp.vision.draw.sheet import spread

    model = unwrapped(model)
    model.eval()
    pictures: dict[str, Picture] = {}
    if data.val[torch.zeros(1, dtype=torch.int64)]["label"].dim() == 3:
        for number, index in enumerate(spread(len(data.val), _OVERLAYS)):
            predicted = batch_outputs(session, model, data.val[torch.tensor([index])])[0]
            pictures[f"val_{number}.png"] = _segmentation_picture(data, data.val, index, predicted)
    else:
        pictures["val.png"], counted = _scene_sheet(session, data, model, _SHEET if metrics else _COUNTED)
        metrics = metrics or counted
    if metrics is not None:
        matrix = metrics.confusion.counts.numpy()
        unit = "pixels" if matrix.sum() > 0 and "val_0.png" in pictures else "images"
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
    from exp.vision.draw.scene import Scene, scene_tile
    from exp.vision.draw.sheet import sheet

    pictures: dict[str, Picture] = {}
    for kind, samples in (("worst", worst), ("best", best)):
        tiles = []
        for place, sample in enumerate(samples, start=1):
            name = Path(data.test.samples[sample.number][0]).name
            if sample.outputs.dim() == 2:
                head = f"{kind} {place}: {name}"
                picture = _segmentation_picture(data, data.test, sample.number, sample.outputs, head)
                pictures[f"{kind}_{place}.png"] = picture
                continue
            batch = data.test[torch.tensor([sample.number])]
            share, likeliest = torch.softmax(sample.outputs.float(), dim=-1).max(dim=-1)
            truth = data.classes[int(batch["label"][0])]
            scene = Scene(name, [(data.classes[int(likeliest)], float(share))], truth)
            tile = scene_tile(batch["image"][0].permute(1, 2, 0).numpy(), scene)
            captions = [tile.captions[0], f"is {truth}  {100 * sample.value:.0f} %", name]
            tiles.append(tile._replace(captions=captions))
        if tiles:
            title = f"the {len(tiles)} {kind} of {len(data.test)} images, by the probability of their class"
            pictures[f"{kind}.png"] = sheet(tiles, title=title)
    return pictures


def _segmentation_picture(data: Any, split: Any, index: int, predicted: torch.Tensor, head: str = "") -> np.ndarray:
    """Image, truth and prediction side by side, and a legend.

    Args:
        data: the data set.
        split: of it.
        index: of an image in the split.
        predicted: its labels, (H, W) or larger: a batch may have been filled up below and on the right.
        head: a line above all; may be empty.
    """
    import numpy as np

    from exp.vision.draw.legend import Entry, legend
    from exp.vision.draw.overlay import colored, told_apart
    from exp.vision.draw.pictures import beside, enlarged, resized_labels, shrunk, to_rgb
    from exp.vision.draw.scale import with_scale_bar
    from exp.vision.draw.text import line
    from exp.vision.metrics import as_in_file

    batch = split[torch.tensor([index])]
    height, width = batch["sizes"][0] if "sizes" in batch else batch["label"].shape[-2:]
    labels = as_in_file(predicted[None], batch)[0].numpy()
    rows, columns = batch["label_sizes"][0] if "label_sizes" in batch else (height, width)
    labels, truth = labels[:rows, :columns], batch["label"][0, :rows, :columns].numpy()
    picture = to_rgb(batch["image"][0, :, :height, :width].permute(1, 2, 0).numpy())
    picture = enlarged(shrunk(picture, _PANEL), 384)
    palette = told_apart(data.palette)
    metres = _metres_per_pixel(data, Path(split.samples[index][0]), (height, width))
    if metres is not None:
        picture = with_scale_bar(picture, metres * width / picture.shape[1])
    panels = [picture, *(colored(resized_labels(each, *picture.shape[:2]), palette) for each in (truth, labels))]
    known = truth != data.ignore_index
    right = f", {100 * (labels == truth)[known].mean():.1f} % of the pixels right" if known.any() else ""
    size = max(picture.shape[1] // 32, 13)
    titles = ["image", "truth (black: does not count)", f"prediction{right}"]
    heads = [line(title, picture.shape[1], size, bold=True) for title in titles]
    page = np.concatenate([beside(heads), beside(panels)])
    entries = [Entry(name, color) for name, color in zip(data.classes, palette)]
    above = [line(head, page.shape[1], size)] if head else []
    return np.concatenate([*above, page, legend(entries, page.shape[1], size)])


def _metres_per_pixel(data: Any, path: Path, size: tuple[int, int]) -> float | None:
    """Of an image as the model saw it; None: not known, or the pipeline has changed its size."""
    from exp.vision.predict.raster import metres_of, open_image

    with open_image(path, data.read, whole=0) as image:
        if (image.height, image.width) != tuple(size):
            return None
        told = metres_of(image)
        return data.metres_per_pixel if told is None else told


def _scene_sheet(session: Session, data: Any, model: Any, count: int) -> tuple[np.ndarray, Any]:
    """A sheet of validation images, and the metrics of ``count`` of them."""
    from exp.vision.draw.scene import Scene, scene_tile
    from exp.vision.draw.sheet import sheet, spread

    metrics = data.metrics()
    numbers = spread(len(data.val), count)
    shown = {numbers[position] for position in spread(len(numbers), _SHEET)}
    tiles = []
    for begin in range(0, len(numbers), data.eval_batch_size):
        part = numbers[begin : begin + data.eval_batch_size]
        batch = data.val[torch.tensor(part)]
        logits = batch_outputs(session, model, batch)
        metrics.update(logits, batch)
        shares, best = torch.softmax(logits.float(), dim=-1).max(dim=-1)
        for row, number in enumerate(part):
            truth = int(batch["label"][row])
            if number in shown and truth >= 0:
                image: np.ndarray = batch["image"][row].permute(1, 2, 0).numpy()
                names = [(data.classes[int(best[row])], float(shares[row]))]
                tiles.append(scene_tile(image, Scene("", names, data.classes[truth])))
    return sheet(tiles, title=f"{len(tiles)} of {len(data.val)} validation images"), metrics
