"""Several views of each image of any image data of exp, and a metric without labels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
import torch
from torch.utils.data import Dataset

from exp.data.base import ExampleBatch
from exp.metrics import Metric
from exp.vision.data.base import DistillationData
from self_supervision.keys import ViewDataConfig

if TYPE_CHECKING:
    from exp.distributed import Distributed


class ViewData(DistillationData):
    """A folder of images; its training samples are views. Keys: :class:`self_supervision.keys.ViewDataConfig`."""

    keys = ViewDataConfig

    def __init__(self, **keys: Any) -> None:
        super().__init__(**keys)
        self.train = Views(self.train, self.keys(**keys))

    @classmethod
    def example_batch(cls, **keys: Any) -> ExampleBatch:
        """For ``task=estimate``."""
        example, config = super().example_batch(**keys), cls.keys(**keys)
        channels = example.train["image"].shape[1]
        views = sample_views(np.zeros((config.global_size, config.global_size, channels), np.uint8), config)
        return example._replace(train={name: torch.from_numpy(array)[None] for name, array in views.items()})

    def metrics(self, detailed: bool = False) -> list[Any]:
        """The effective rank of the features."""
        return [EffectiveRank()]


class Views(Dataset):
    """Map-style: each sample is a dict of :func:`sample_views`; exp seeds NumPy's generator for each sample.

    Args:
        images: a split of exp's image data, indexed by samples and epochs, (B, 2).
        config: the keys.
    """

    def __init__(self, images: Any, config: ViewDataConfig) -> None:
        self.images, self.config = images, config

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, number: int) -> dict[str, np.ndarray]:
        image = self.images[torch.tensor([[number, 0]])]["image"][0]
        return sample_views(image.permute(1, 2, 0).numpy(), self.config)


def sample_views(image: np.ndarray, config: ViewDataConfig) -> dict[str, np.ndarray]:
    """Draw the views of an image (H, W, C), 0..255.

    Returns:
        ``global_views`` (2, C, S, S) and ``local_views`` (V, C, s, s), of the image's dtype; ``masked``, the numbers of
        the masked patches of the first global view, int64 (M,), as many in each image.
    """
    views = {
        f"{kind}_views": np.stack([_view(image, size, area, config.jitter) for _ in range(count)])
        for kind, size, area, count in (
            ("global", config.global_size, config.global_area, 2),
            ("local", config.local_size, config.local_area, config.local_views),
        )
    }
    patches = (-(-config.global_size // config.patch_size)) ** 2
    masked = np.random.permutation(patches)[: max(round(config.mask_ratio * patches), 1)]
    return {**views, "masked": np.sort(masked)}


def _view(image: np.ndarray, size: int, area: Any, jitter: float) -> np.ndarray:
    """A random part, turned, mirrored, and with changed colors: (C, size, size)."""
    height, width = image.shape[:2]
    side = np.sqrt(np.random.uniform(*area))
    ratio = np.exp(np.random.uniform(np.log(3 / 4), np.log(4 / 3)) / 2)
    rows, columns = (int(np.clip(round(extent * part), 1, extent))
                     for extent, part in ((height, side * ratio), (width, side / ratio)))  # fmt: skip
    top, left = np.random.randint(height - rows + 1), np.random.randint(width - columns + 1)
    part = image[top : top + rows, left : left + columns]
    # Channel by channel: OpenCV resizes four at most.
    channels = [cv2.resize(np.ascontiguousarray(part[..., band]), (size, size), interpolation=cv2.INTER_LINEAR)
                for band in range(image.shape[2])]  # fmt: skip
    view: Any = np.stack(channels, axis=-1).astype(np.float32)
    view = np.rot90(view, np.random.randint(4))[:, :: np.random.choice((-1, 1))]
    brightness, contrast, saturation = np.random.uniform(1 - jitter, 1 + jitter, 3)
    if np.random.random() < 0.8:
        view = view * brightness
        view = (view - view.mean()) * contrast + view.mean()
        gray = view.mean(axis=-1, keepdims=True)
        view = (view - gray) * saturation + gray
    if np.random.random() < 0.2:
        view = np.broadcast_to(view.mean(axis=-1, keepdims=True), view.shape)
    if np.random.random() < 0.5:
        blurred = cv2.GaussianBlur(np.ascontiguousarray(view), (0, 0), np.random.uniform(0.1, 0.02 * size + 0.2))
        view = blurred.reshape(view.shape)
    view = np.clip(np.rint(view) if image.dtype == np.uint8 else view, 0.0, 255.0)
    return np.ascontiguousarray(view.astype(image.dtype).transpose(2, 0, 1))


class EffectiveRank(Metric):
    """Exponential of the entropy of the features' singular values (RankMe, arXiv 2210.02885): near 1 after a collapse.

    From the sums of outer products, so that it does not depend on batches and ranks.
    """

    names = ("effective_rank",)
    greater_is_better = True

    def reset(self) -> None:
        """See :class:`exp.metrics.Metric`."""
        self.features: list[torch.Tensor] = []

    def update(self, outputs: torch.Tensor, batch: dict[str, Any]) -> None:
        """Keep the features (B, D)."""
        self.features.append(outputs.detach().cpu().double())

    def compute(self, distributed: Distributed) -> dict[str, float]:
        """Over all ranks."""
        size = max(distributed.gather(self.features[0].shape[1] if self.features else 0))
        total = torch.zeros(size, size, dtype=torch.float64)
        for part in self.features:
            total += part.t() @ part
        distributed.sum(total)
        values = np.sqrt(np.clip(np.linalg.eigvalsh(total.numpy()), 0.0, None))
        shares = values / values.sum() + 1e-12
        return {"effective_rank": float(np.exp(-(shares * np.log(shares)).sum()))}
