"""Pictures of a training of images that has ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from exp.engine.outputs import batch_outputs
from exp.engine.wrapper import unwrapped

if TYPE_CHECKING:
    import numpy as np

    from exp.draw.files import Picture
    from exp.session import Session

__all__ = ["draw_images"]

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
            pictures[f"val_{number}.png"] = _segmentation_picture(session, data, model, index)
    else:
        pictures["val.png"], counted = _scene_sheet(session, data, model, _SHEET if metrics else _COUNTED)
        metrics = metrics or counted
    if metrics is not None:
        matrix = metrics.confusion.counts.numpy()
        unit = "pixels" if matrix.sum() > 0 and "val_0.png" in pictures else "images"
        pictures["confusion.png"] = confusion_figure(matrix, data.classes, f"{int(matrix.sum()):,} {unit}")
    return pictures


def _segmentation_picture(session: Session, data: Any, model: Any, index: int) -> np.ndarray:
    """Image, truth and prediction side by side, and a legend."""
    import numpy as np

    from exp.vision.draw.legend import Entry, legend
    from exp.vision.draw.overlay import colored
    from exp.vision.draw.pictures import beside, enlarged, shrunk, shrunk_labels, to_rgb
    from exp.vision.draw.text import line

    batch = data.val[torch.tensor([index])]
    height, width = batch["sizes"][0] if "sizes" in batch else batch["label"].shape[-2:]
    predicted = batch_outputs(session, model, batch)[0, :height, :width].numpy()
    truth = batch["label"][0, :height, :width].numpy()
    image = batch["image"][0, :, :height, :width].permute(1, 2, 0).numpy()
    picture = enlarged(shrunk(to_rgb(image), _PANEL), 384)
    panels = [picture]
    for labels in (truth, predicted):
        panels.append(colored(shrunk_labels(labels, *picture.shape[:2]), data.palette))
    known = truth != data.ignore_index
    right = f", {100 * (predicted == truth)[known].mean():.1f} % of the pixels right" if known.any() else ""
    size = max(picture.shape[1] // 32, 13)
    titles = ["image", "truth (black: does not count)", f"prediction{right}"]
    heads = [line(title, picture.shape[1], size, bold=True) for title in titles]
    page = np.concatenate([beside(heads), beside(panels)])
    entries = [Entry(name, color) for name, color in zip(data.classes, data.palette)]
    return np.concatenate([page, legend(entries, page.shape[1], size)])


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
