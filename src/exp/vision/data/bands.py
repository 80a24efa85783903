"""Convert the values of an image file to the model's input: its channels, 0..255, filled where there is no data.

``data.bands`` chooses bands by number, or by their names in the files; without it, three bands that a file calls blue,
green and red are read as red, green and blue. A last channel that the file marks as
transparency is not a band unless ``data.bands`` names it: it marks pixels without data.

8-bit values stay uint8. All others become float32: ``value_range`` is mapped to 0..255, values outside are clipped.
"""

from __future__ import annotations

import contextlib
import os
import re
from typing import Any, NamedTuple, Sequence, Union

import numpy as np

from exp.data.fingerprint import shortened
from exp.errors import DataError
from exp.vision.data.decode import RawImage, open_raster, read_band_info, read_raw, uses_rasterio
from exp.vision.data.keys import ImageDataConfig

__all__ = ["ImageReader", "Modalities", "ReaderBySource", "color_positions", "is_data_band", "per_band"]

Path = Union[str, "os.PathLike[str]"]

# Names of bands: words, or the numbers of Sentinel-2, whose red is B4.
_COLOR_NAMES = ({"red", "r", "b4"}, {"green", "g", "b3"}, {"blue", "b", "b2"})
_GRAY = np.array([0.299, 0.587, 0.114], np.float32)  # ITU-R BT.601 luma


class BandSelection(NamedTuple):
    """The bands to read from one file.

    Attributes:
        indexes: of the bands that the model gets, from 0, in the model's order.
        alpha: index of a transparency band that is not in ``indexes``; None: there is none.
        names: of the bands that ``data.bands`` chooses; the number for a band without a name.
        num_bands: bands of the file without transparency.
    """

    indexes: list[int]
    alpha: int | None
    names: list[str]
    num_bands: int


def _band_index(band: int | str, names: Sequence[str], path: Path) -> int:
    keys: list[Any] = [*range(1, len(names) + 1)] if isinstance(band, int) else [_band_key(name) for name in names]
    key = band if isinstance(band, int) else _band_key(str(band))
    indexes = [index for index, candidate in enumerate(keys) if candidate == key]
    if len(indexes) != 1:
        raise DataError(
            f"{path} has {len(indexes) or 'no'} band{'s' * (len(indexes) > 1)} {band}, which data.bands asks for; it "
            f"has {len(names)}: {shortened(names, 20)}; choose one by its number"
        )
    return indexes[0]


def _band_key(name: str) -> str:
    """The name of a band up to the first comma or bracket, without case and leading zeros.

    ``B04``, ``b4``, ``Band 4`` and ``B4, central wavelength 665 nm`` are the same band, ``B8A`` is another.
    """
    text = re.split(r"[,;:(]", name)[0].strip().casefold()
    return re.sub(r"^(?:band[ _-]?|b)0*(\d+a?)$", r"b\1", text)


def is_data_band(last: np.ndarray) -> bool:
    """Whether a channel that is marked as alpha has data: most of its values are neither transparent nor opaque.

    GDAL marks a fourth 8-bit band as alpha if the file does not say what it is.

    Args:
        last: the channel, any shape.
    """
    return bool(last.size) and bool(np.count_nonzero((last > 0) & (last < last.max())) > last.size / 2)


def color_positions(names: Sequence[str]) -> list[int | None]:
    """The positions of red, green and blue among the bands; None for a color without exactly one band.

    Args:
        names: of the bands: words, or ``B04``, ``B03``, ``B02`` as in Sentinel-2.
    """
    keys = [_band_key(name).split(" ")[0] for name in names]
    positions = [[index for index, name in enumerate(keys) if name in words] for words in _COLOR_NAMES]
    return [matches[0] if len(matches) == 1 else None for matches in positions]


def color_order(names: Sequence[str]) -> list[int]:
    """The positions of red, green and blue among three bands with these names in another order; else empty."""
    positions = [position for position in color_positions(names) if position is not None]
    in_order = list(range(len([name for name in names if name != "alpha"])))
    return positions if sorted(positions) == in_order != positions else []


class Modalities:
    """Mean and standard deviation of modalities that differ from the model's; picklable.

    The model normalizes all images with its own statistics. Images of another modality are mapped before, so that the
    result is as if the model had normalized them with the statistics of their modality.

    Attributes:
        statistics: ``{modality: {"mean": [...], "std": [...]}}``, 0..255, as plain values.
        by_path: the modality of images that have another one than ``data.modality``, by path.

    Args:
        config: ``modality``, of all images, and ``modality_statistics`` are read.
    """

    def __init__(self, config: ImageDataConfig) -> None:
        self.only = config.modality
        self.by_path: dict[str, str | None] = {}
        self.statistics = {name: dict(statistics) for name, statistics in (config.modality_statistics or {}).items()}
        self._model: tuple[np.ndarray, np.ndarray] | None = None

    def use_model_statistics(self, mean: np.ndarray, std: np.ndarray) -> None:
        """Set the model's mean and standard deviation, float (C,), 0..255."""
        self._model = mean.astype(np.float32), std.astype(np.float32)

    def of(self, path: Path) -> str | None:
        """The modality of an image; None: not known."""
        return self.by_path.get(str(path), self.only)

    def fill_value_for(self, path: Path, fill: np.ndarray | None) -> np.ndarray | None:
        """The values of missing pixels before :meth:`map_statistics`: the mean of the image's modality, or ``fill``."""
        values = self.statistics.get(self.of(path) or "")
        return fill if values is None or fill is None else np.broadcast_to(np.float32(values["mean"]), fill.shape)

    def map_statistics(self, image: np.ndarray, path: Path) -> np.ndarray:
        """Map an image (H, W, C), 0..255, so that the model's normalization has the effect of its modality's; float32.

        Images of modalities without statistics of their own are returned unchanged.
        """
        values = self.statistics.get(self.of(path) or "")
        if values is None or self._model is None:
            return image
        mean, std = np.float32(values["mean"]), np.float32(values["std"])
        factor = self._model[1] / std
        return image.astype(np.float32) * factor + (self._model[0] - mean * factor)


class ImageReader:
    """Reads image files as the model's input; picklable.

    Attributes:
        fill: the values that replace missing ones, 0..255, float (C,); None: not known yet.
        value_range: plain numbers, or lists over bands; None: not set.
        modalities: statistics of other sensors.
        bands: ``data.bands``; None: all bands are read in order.
        channels: of the model's input (C).
        num_file_bands: number of bands (without transparency) of the training files; None: not known yet. Numbers in
            ``data.bands`` would mean other bands in a file with more or fewer.

    Args:
        config: the keys ``bands``, ``channels``, those that :class:`Modalities` reads, and ``value_range``: [low, high]
            that become 0 and 255 if values are not 8-bit, numbers or lists over channels (None: such files are
            refused).

    Raises:
        DataError: ``value_range`` is not valid.
    """

    def __init__(self, config: ImageDataConfig | None = None) -> None:
        config = config or ImageDataConfig()
        self.bands = list(config.bands) if config.bands else None
        self.channels = config.channels if self.bands is None else len(self.bands)
        self.num_file_bands: int | None = None
        self.modalities = Modalities(config)
        self.fill: np.ndarray | None = None
        limits: list[Any] = [per_band(limit, self.channels) for limit in config.value_range or (0.0, 1.0)]
        if len(limits) != 2 or None in limits or not np.less(*limits).all():
            raise DataError(
                f"data.value_range={config.value_range} must be [low, high], low below high, a number each or one for "
                f"each of {self.channels} bands"
            )
        self.value_range: list[Any] | None = None
        if config.value_range:
            self.value_range = [np.asarray(limit, np.float64).tolist() for limit in config.value_range]

    def select_bands(self, count: int, names: Sequence[str], has_alpha: bool, path: Path) -> BandSelection:
        """The bands to read from one file.

        Args:
            count: number of its bands.
            names: of its bands; empty: the file has no names.
            has_alpha: whether it marks the last band as transparency.
            path: of the file, for messages.

        Raises:
            DataError: the file lacks a band; or ``data.bands`` has numbers, and the number of bands is not
                ``num_file_bands``.
        """
        num_bands = count - (has_alpha and count > 1)
        if self.bands is None:
            order = color_order(names[:num_bands]) or list(range(num_bands))
            return BandSelection(order, num_bands if num_bands < count else None, [], num_bands)
        if self.num_file_bands not in (None, num_bands) and any(isinstance(band, int) for band in self.bands):
            raise DataError(
                f"{path} has {num_bands} bands, but the training images {self.num_file_bands}: the numbers in "
                f"data.bands={self.bands} would mean others here; keep such files apart, or choose bands by name"
            )
        names = [name or str(number) for number, name in enumerate(names or [""] * count, 1)]
        indexes = [_band_index(band, names, path) for band in self.bands]
        alpha = num_bands if num_bands < count and num_bands not in indexes else None
        return BandSelection(indexes, alpha, [names[index] for index in indexes], num_bands)

    def band_order_notes(self, path: Path) -> list[str]:
        """A note if the bands of a file are reordered by their names (:func:`color_order`); else empty."""
        order: list[int] = []
        if self.bands is None and uses_rasterio(path):
            with contextlib.suppress(DataError), open_raster(path) as file:  # reported when the file is loaded
                order = color_order(read_band_info(file)[1])
        return [f"note: {path} names its bands: they are read as red, green, blue, not in their order"] if order else []

    def __call__(self, path: Path) -> np.ndarray:
        """Read an image file as the model's input: (H, W, C), uint8 or float32, 0..255."""
        return self.read_with_missing(path)[0]

    def read_with_missing(self, path: Path) -> tuple[np.ndarray, np.ndarray | None]:
        """Read an image file as the model's input, and where it has no data, bool (H, W); None: all pixels have data.

        Raises:
            DataError: the file cannot be read, or lacks a band.
        """
        values, invalid, missing = self.select_channels(read_raw(path), path)
        return self.to_model_range(values, invalid, path), missing

    def select_channels(self, raw: RawImage, path: Path) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
        """:meth:`to_channels` for a decoded file."""
        pixels = raw.pixels
        selection = self.select_bands(pixels.shape[2], raw.names, raw.alpha, path)
        transparency = None if selection.alpha is None else pixels[..., selection.alpha]
        if transparency is not None and is_data_band(transparency):
            transparency = None
        is_in_order = selection.indexes == list(range(len(selection.indexes)))  # a slice copies nothing
        selected = pixels[..., : len(selection.indexes)] if is_in_order else pixels[..., selection.indexes]
        return self.to_channels(selected, transparency, raw.nodata, raw.masked, path)

    def to_channels(
        self,
        pixels: np.ndarray,
        transparency: np.ndarray | None,
        nodata: float | None,
        masked: np.ndarray | None,
        path: Path,
    ) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
        """Convert the bands of a file to the channels of the model, with the values and dtype of the file.

        Args:
            pixels: the chosen bands, (H, W, bands).
            transparency: (H, W), 0: no data; None: there is none.
            nodata: the value that means no data; None: there is none.
            masked: True where a mask in the file marks missing data, bool (H, W); None: there is no mask.
            path: of the file, for messages.

        Returns:
            Values (H, W, C); True where a value has no data, bool (H, W, C); True where a pixel lacks data in all
            channels, bool (H, W). None instead of either array: all have data.

        Raises:
            DataError: the number of channels is another one.
        """
        invalid = _invalid_values(pixels, nodata)
        missing_masks: list[Any] = [] if masked is None else [masked]
        missing_masks += [] if transparency is None else [transparency == 0]
        missing_masks += [] if invalid is None else [invalid.all(axis=2)]
        missing = np.logical_or.reduce(missing_masks) if missing_masks and np.any(missing_masks) else None
        if missing is not None:
            missing_in_all = missing[..., None]
            invalid = missing_in_all.repeat(pixels.shape[2], axis=2) if invalid is None else invalid | missing_in_all
        channels = self._channels(pixels, path)
        if invalid is not None and invalid.shape[2] != self.channels:
            invalid = invalid.any(axis=2, keepdims=True).repeat(self.channels, axis=2)
        return channels, invalid, missing

    def _channels(self, pixels: np.ndarray, path: Path) -> np.ndarray:
        """Repeat a gray image for three channels, or make a color image gray for one channel."""
        num_bands, channels = pixels.shape[2], self.channels
        if num_bands == channels:
            return pixels
        if num_bands == 1 and channels == 3:
            return np.repeat(pixels, 3, axis=2)
        if num_bands == 3 and channels == 1:
            gray = pixels.astype(np.float32) @ _GRAY
            return (np.rint(gray) if pixels.dtype.kind in "iu" else gray).astype(pixels.dtype)[..., None]
        raise DataError(
            f"{path} has {num_bands} channels, transparency aside, but data.channels={channels}; give images of "
            f"{channels}, train a model for {num_bands} with data.channels={num_bands}, or choose bands with data.bands"
        )

    def to_model_range(self, values: np.ndarray, invalid: np.ndarray | None, path: Path) -> np.ndarray:
        """Convert the result of :meth:`select_channels` to the model's input: (H, W, C), uint8 or float32, 0..255.

        Raises:
            DataError: values are not 8-bit, and ``value_range`` is not set.
        """
        if values.dtype != np.uint8:
            values = _to_byte_range(values, path, self.value_range)
        fill = self.modalities.fill_value_for(path, self.fill)
        if fill is not None and invalid is not None:
            filler = np.rint(fill).astype(np.uint8) if values.dtype == np.uint8 else fill.astype(np.float32)
            values = np.where(invalid, filler, values)
        return np.ascontiguousarray(values)


def per_band(values: Any, channels: int) -> list[float] | None:
    """A list with a finite number for each band, from one number or a list; None: ``values`` is not valid."""
    try:
        array = np.broadcast_to(np.asarray(values, np.float64), channels)
    except (TypeError, ValueError):
        return None
    return array.tolist() if np.isfinite(array).all() else None


def _invalid_values(pixels: np.ndarray, nodata: float | None) -> np.ndarray | None:
    """True where a value is not finite or is the no-data value, bool (H, W, C); None: all have data.

    In 8-bit images the no-data value is a common color: there it counts only if all channels of a pixel have it.
    """
    invalid: np.ndarray | None = ~np.isfinite(pixels) if pixels.dtype.kind == "f" else None
    if nodata is not None and not np.isnan(nodata):
        # In the dtype of the values: a float32 file holds its no-data value rounded.
        limits = np.iinfo(pixels.dtype) if pixels.dtype.kind in "iu" else None
        if limits is None or (nodata == int(nodata) and limits.min <= nodata <= limits.max):
            same: np.ndarray = np.equal(pixels, pixels.dtype.type(nodata))
            if pixels.dtype == np.uint8:
                same = np.broadcast_to(same.all(axis=2, keepdims=True), pixels.shape)
            invalid = same if invalid is None else np.logical_or(invalid, same)
    return invalid if invalid is not None and invalid.any() else None


def _to_byte_range(pixels: np.ndarray, path: Path, value_range: Any) -> np.ndarray:
    if value_range is None:
        raise DataError(
            f"{path} holds {pixels.dtype} values from {np.nanmin(pixels):g} to {np.nanmax(pixels):g}; set "
            "data.value_range=[low,high] to the values that become 0 and 255 (task=stats prints percentiles)"
        )
    low, high = (np.asarray(limit, np.float64) for limit in value_range)
    scaled = (pixels.astype(np.float32) - low.astype(np.float32)) * (255.0 / (high - low)).astype(np.float32)
    return np.nan_to_num(np.clip(scaled, 0.0, 255.0, out=scaled), copy=False, nan=0.0)


class ReaderBySource(ImageReader):
    """Reads the images of several sources, and other images like those of the first.

    Args:
        config: the keys of the first source.
        readers: of each source.
        paths: of the images of each source.
    """

    def __init__(self, config: ImageDataConfig, readers: Sequence[ImageReader], paths: Sequence[Sequence[str]]) -> None:
        super().__init__(config)
        self.readers = readers
        self._by_path = {path: number for number, members in enumerate(paths) for path in members}
        self.modalities.by_path = {path: readers[number].modalities.only for path, number in self._by_path.items()}
        for reader in readers:
            reader.modalities = self.modalities  # for all, since weights bring other statistics

    def _of(self, path: Path) -> Any:
        number = self._by_path.get(str(path))
        return super() if number is None else self.readers[number]

    def select_bands(self, count: int, names: Sequence[str], has_alpha: bool, path: Path) -> BandSelection:
        """See :class:`ImageReader`, as for the other methods."""
        selection: BandSelection = self._of(path).select_bands(count, names, has_alpha, path)
        return selection

    def to_model_range(self, values: np.ndarray, invalid: np.ndarray | None, path: Path) -> np.ndarray:
        """See :class:`ImageReader`."""
        number = self._by_path.get(str(path))
        if number is not None:
            self.readers[number].fill = self.fill
        image: np.ndarray = self._of(path).to_model_range(values, invalid, path)
        return image
