"""MixUp and CutMix: training images that are made of two.

The second image, the partner, is another sample of the training split. Sample, epoch and seed alone determine it, not
the batch: a run is the same for any number of ranks, and after resuming.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable, Tuple

import numpy as np

from exp.errors import ConfigError

if TYPE_CHECKING:
    from exp.vision.data.keys import ImageDataConfig

__all__ = ["Mixer"]

Sample = Tuple[np.ndarray, Any]  # image (H, W, C), and label


class Mixer:
    """Mixes a sample with a partner, with probability ``data.mix_prob``; draws from NumPy's global generator.

    With both ``data.mixup_alpha`` and ``data.cutmix_alpha``, one of the two methods is drawn each time.

    Args:
        config: the keys of ``data``.
        num_classes: of scenes (K), whose labels become shares of the classes, float32 (K,), all 0 for an ignored one;
            None: a label is a mask, which is pasted like the image, or there are none.
        has_masks: whether each pixel has a label.

    Raises:
        ConfigError: a key is out of range, or masks are to be averaged.
    """

    def __init__(self, config: ImageDataConfig, num_classes: int | None, has_masks: bool) -> None:
        alphas = {"mixup_alpha": config.mixup_alpha, "cutmix_alpha": config.cutmix_alpha}
        if min(alphas.values()) < 0.0 or not 0.0 <= config.mix_prob <= 1.0:
            raise ConfigError(f"data: {alphas} must not be below 0, and mix_prob={config.mix_prob} from 0 to 1")
        if has_masks and config.mixup_alpha:
            raise ConfigError(
                "data.mixup_alpha: a pixel of a mask has one class, so that masks have no mean",
                "use data.cutmix_alpha for segmentation",
            )
        self.methods = [(mix, alpha) for mix, alpha in ((_mixup, config.mixup_alpha), (_cutmix, config.cutmix_alpha))
                        if alpha]  # fmt: skip
        self.prob, self.num_classes, self.has_masks = config.mix_prob, num_classes, has_masks

    def __call__(self, sample: Sample, position: int, count: int, read: Callable[[int], Sample | None]) -> Sample:
        """The sample, mixed or not.

        Args:
            sample: image and label, after the pipeline.
            position: of the sample in its epoch.
            count: number of positions.
            read: gives the sample at a position, after the pipeline; None if it is skipped, and nothing is mixed.

        Raises:
            ConfigError: the images have different sizes.
        """
        image, label = sample[0], self._shares(sample[1])
        if count < 2 or np.random.random() >= self.prob:
            return image, label
        mix, alpha = self.methods[np.random.randint(len(self.methods))]
        share = np.random.beta(alpha, alpha)
        # Drawn before the partner is read, whose transforms draw, too.
        partner, corner = (position + 1 + np.random.randint(count - 1)) % count, np.random.random(2)
        other = read(int(partner))
        if other is None:
            return image, label
        if other[0].shape != image.shape:
            shapes = " and ".join(f"{height}x{width}" for height, width, _ in (image.shape, other[0].shape))
            raise ConfigError(
                f"data.train_pipeline gives images of different sizes ({shapes}), which cannot be mixed; end it with a "
                "RandomCrop or CenterCrop and a PadTo, or with Resize(keep_ratio=false)"
            )
        mixed, weight, box = mix(image, other[0], share, corner)
        if self.has_masks:
            label = label.copy()
            label[box] = other[1][box]
        elif self.num_classes is not None:
            label = np.float32(weight) * label + np.float32(1.0 - weight) * self._shares(other[1])
        return mixed, label

    def _shares(self, label: Any) -> Any:
        if self.has_masks or self.num_classes is None:
            return label
        shares = np.zeros(self.num_classes, np.float32)
        shares[label : label + 1] = 1.0  # nothing at -1: ignored
        return shares


def _mixup(image: np.ndarray, other: np.ndarray, share: float, _: Any) -> tuple[np.ndarray, float, Any]:
    """``share`` of the image, and 1 - ``share`` of the other (Zhang et al., arXiv 1710.09412); 8-bit values are
    rounded.
    """
    mixed = image * np.float32(share) + other * np.float32(1.0 - share)
    return (np.rint(mixed) if image.dtype == np.uint8 else mixed).astype(image.dtype), share, ()


def _cutmix(image: np.ndarray, other: np.ndarray, share: float, corner: Any) -> tuple[np.ndarray, float, Any]:
    """A box of the other image is pasted into the image (Yun et al., arXiv 1905.04899, algorithm A1).

    The box has sides of sqrt(1 - ``share``) of the image's, and a center anywhere, and is cropped to the image; the
    share that remains is that of the pixels.
    """
    bounds = []
    for extent, position in zip(image.shape[:2], corner):
        half, center = int(extent * np.sqrt(1.0 - share)) // 2, int(position * extent)
        bounds.append(slice(max(center - half, 0), min(center + half, extent)))
    box = tuple(bounds)
    mixed = image.copy()
    mixed[box] = other[box]
    return mixed, 1.0 - mixed[box].size / mixed.size, box
