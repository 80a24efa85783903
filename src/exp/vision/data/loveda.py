"""LoveDA (Wang et al., NeurIPS 2021), as it is published and as OpenMMLab's tools convert it."""

from __future__ import annotations

from pathlib import Path

from exp.data.places import content_of
from exp.errors import DataError
from exp.vision.data.listing import Listing, image_files

__all__ = ["CLASSES", "check", "find"]

CLASSES = ["background", "building", "road", "water", "barren", "forest", "agriculture"]
_AREAS = ("Urban", "Rural")
_EXPECTED = (
    "expected: <data.root>/{Train,Val}/{Urban,Rural}/{images_png,masks_png}, or OpenMMLab's "
    "<data.root>/{img_dir,ann_dir}/{train,val}"
)


def check(root: Path) -> None:
    """Refuse a root with neither layout; looks at folders only.

    Raises:
        DataError: says what was expected and what is there.
    """
    if _is_published(root) or _is_converted(root):
        return
    near = [place for place in (root.parent, *(child for child in root.iterdir() if child.is_dir()))
            if _is_published(place) or _is_converted(place)]  # fmt: skip
    hints = [f"there is one here: data.root={place}" for place in near]
    raise DataError("\n  ".join([f"data.root={root} holds no LoveDA", _EXPECTED, content_of(root), *hints]))


def find(root: Path) -> Listing:
    """All pairs of an image and a mask; the published test split has no masks, so ``val`` is the test split, too.

    Raises:
        DataError: an image has no mask, or a part is empty.
    """
    check(root)
    published = _is_published(root)
    parts: dict[str, list[tuple[str, str]]] = {}
    for part in ("train", "val"):
        if published:
            above = [root / part.capitalize() / area for area in _AREAS]
            places = [(place / "images_png", place / "masks_png") for place in above if place.is_dir()]
        else:
            places = [(root / "img_dir" / part, root / "ann_dir" / part)]
        parts[part] = [pair for images, masks in places for pair in _pairs(images, masks)]
        if not parts[part]:
            raise DataError(f"LoveDA in {root} has no images for {part}\n  {_EXPECTED}")
    if published:  # 0: no data; 1 to 7: the classes
        return Listing(list(CLASSES), dict(parts), mask_values={value: value - 1 for value in range(1, 8)}, ignored=[0])
    return Listing(list(CLASSES), dict(parts), ignored=[255])


def _pairs(images: Path, masks: Path) -> list[tuple[str, str]]:
    for folder in (images, masks):
        if not folder.is_dir():
            raise DataError(f"{folder} is missing\n  {_EXPECTED}")
    by_name = {Path(path).name: path for path in image_files(masks)}
    pairs = []
    for path in image_files(images):
        name = Path(path).name
        if name not in by_name:
            raise DataError(f"{path} has no mask {masks / name}; copy LoveDA anew")
        pairs.append((path, by_name[name]))
    return pairs


def _is_published(root: Path) -> bool:
    return any((root / "Train" / area / "images_png").is_dir() for area in _AREAS)


def _is_converted(root: Path) -> bool:
    return (root / "img_dir" / "train").is_dir() and (root / "ann_dir" / "train").is_dir()
