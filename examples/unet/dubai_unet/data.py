"""The data set: tiles with masks of colors."""

from __future__ import annotations

import functools
import importlib.util
import random
from pathlib import Path
from typing import Any, Mapping

import numpy as np
from PIL import Image
from torch.utils.data import Dataset
from torch.utils.data.dataloader import default_collate

from dubai_unet.metric import MeanIou
from exp.data.base import Data
from exp.engine.evaluate import batch_outputs
from exp.errors import DataError
from exp.session import Session

__all__ = ["Crops", "Tiles", "Windows"]

COLORS = {"building": 0x3C1098, "land": 0x8429F6, "road": 0x6EC1E4, "vegetation": 0xFEDD3A, "water": 0xE2A929}
IGNORED = 255


@functools.lru_cache(maxsize=32)
def read_tile(image: Path, shrink: int) -> tuple[np.ndarray, np.ndarray]:
    """A tile's pixels, uint8 (H, W, 3), and labels, int64 (H, W)."""
    picture = Image.open(image).convert("RGB").reduce(shrink)
    mask = Image.open(mask_of(image)).convert("RGB").resize(picture.size, Image.Resampling.NEAREST)
    colors = np.asarray(mask).astype(np.int64) @ (0x10000, 0x100, 1)
    labels = np.full(colors.shape, IGNORED, dtype=np.int64)
    for number, color in enumerate(COLORS.values()):
        labels[colors == color] = number
    return np.asarray(picture), labels


def mask_of(image: Path) -> Path:
    """The path of an image's mask."""
    return image.parents[1] / "masks" / f"{image.stem}.png"


def cut(image: Path, shrink: int, size: int, top: int, left: int) -> dict[str, np.ndarray]:
    """A window of a tile as a sample; pixels outside of the tile are black, and their labels are ignored."""
    pixels, labels = (part[top : top + size, left : left + size] for part in read_tile(image, shrink))
    missing = [(0, size - extent) for extent in labels.shape]
    pixels = np.pad(pixels, [*missing, (0, 0)])
    return {"image": pixels.transpose(2, 0, 1).copy(), "label": np.pad(labels, missing, constant_values=IGNORED)}


class Crops(Dataset):
    """Random crops, flipped at random: ``crops`` samples of each tile."""

    def __init__(self, images: list[Path], shrink: int, size: int, crops: int) -> None:
        self.images, self.shrink, self.size, self.crops = images, shrink, size, crops

    def __len__(self) -> int:
        return len(self.images) * self.crops

    def __getitem__(self, number: int) -> dict[str, np.ndarray]:
        image = self.images[number // self.crops]
        height, width = read_tile(image, self.shrink)[1].shape
        top, left = (random.randint(0, max(extent - self.size, 0)) for extent in (height, width))  # noqa: S311
        sample = cut(image, self.shrink, self.size, top, left)
        if random.random() < 0.5:  # noqa: S311
            sample = {name: value[..., ::-1].copy() for name, value in sample.items()}
        return sample


class Windows(Dataset):
    """Windows side by side, which cover each pixel of each tile once."""

    def __init__(self, images: list[Path], shrink: int, size: int) -> None:
        self.shrink, self.size = shrink, size
        self.places: list[tuple[Path, int, int]] = []
        for image in images:
            width, height = (-(-extent // shrink) for extent in Image.open(image).size)  # reads the header only
            self.places += [(image, top, left) for top in range(0, height, size) for left in range(0, width, size)]

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, number: int) -> dict[str, np.ndarray]:
        image, top, left = self.places[number]
        return cut(image, self.shrink, self.size, top, left)


class Tiles(Data):
    """``tile<n>/images/*.jpg`` with ``tile<n>/masks/*.png``; every fourth image is for validation and test.

    Args:
        name: of the data set.
        root: folder of the tiles; None: those that come with exp.
        size: side of a sample in pixels.
        shrink: factor by which the resolution of the files is reduced.
        crops: samples of each tile in an epoch.
        eval_batch_size: windows per rank and batch in evaluation.
        num_workers: data-loader processes per rank.

    Raises:
        DataError: there are no tiles, or one has no mask.
    """

    def __init__(
        self,
        name: str,
        root: str | None = None,
        size: int = 128,
        shrink: int = 4,
        crops: int = 4,
        eval_batch_size: int = 16,
        num_workers: int = 0,
    ) -> None:
        self.name, self.eval_batch_size, self.num_workers = name, eval_batch_size, num_workers
        folder = Path(root).expanduser() if root else sample_tiles()
        images = sorted(folder.glob("*/images/*.jpg"))
        if not images:
            raise DataError(f"data.root={folder} has no tile<n>/images/*.jpg")
        without = [image for image in images if not mask_of(image).is_file()]
        if without:
            raise DataError(f"{without[0]} has no mask: there is no {mask_of(without[0])}")
        held_out = images[3::4]
        self.train = Crops([image for image in images if image not in held_out], shrink, size, crops)
        self.val = self.test = Windows(held_out, shrink, size)
        self.test_split_name = "validation"

    def metrics(self, detailed: bool = False) -> MeanIou:
        """Mean IoU over the labeled pixels."""
        return MeanIou(list(COLORS))

    def model_arguments(self) -> dict[str, Any]:
        """Arguments of the model that follow from the data."""
        return {"num_classes": len(COLORS), "in_channels": 3, "ignore_index": IGNORED}

    def state_dict(self) -> dict[str, Any]:
        """What is saved with weights: the classes in their order."""
        return {"classes": list(COLORS)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Refuse the weights of other classes."""
        if list(state["classes"]) != list(COLORS):
            raise DataError(f"the weights are for {', '.join(state['classes'])}, not for {', '.join(COLORS)}")

    def setup(self, session: Session) -> None:
        """Register the plots that are drawn after a training."""
        session.extensions.pictures = functools.partial(self.pictures, session)

    def pictures(self, session: Session, model: Any, evaluator: Any = None) -> dict[str, np.ndarray]:
        """Image, truth and prediction of four windows, one below the other."""
        step = max(len(self.test) // 4, 1)
        batch = default_collate([self.test[number] for number in range(0, len(self.test), step)][:4])
        predicted = batch_outputs(session, model, batch)
        colors = np.zeros((256, 3), dtype=np.uint8)
        colors[: len(COLORS)] = [tuple(color.to_bytes(3, "big")) for color in COLORS.values()]
        columns = [batch["image"].permute(0, 2, 3, 1).numpy(), colors[batch["label"]], colors[predicted]]
        rows = np.concatenate([np.concatenate(list(column)) for column in columns], axis=1)
        return {"windows.png": rows}


def sample_tiles() -> Path:
    """The tiles that come with exp."""
    spec = importlib.util.find_spec("exp.sample_data")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(next(iter(spec.submodule_search_locations))) / "dubai"
