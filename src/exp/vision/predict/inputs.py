"""Which image files to work on, what their results are called, and which rank does which."""

from __future__ import annotations

import glob
import logging
import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, NamedTuple, Sequence

import torch

from exp.engine.wrapper import forward, preprocessed
from exp.errors import ConfigError, DataError, RunError
from exp.vision.data.layouts import NAMED_FILES, SUFFIXES, files_below

if TYPE_CHECKING:
    from exp.session import Session

__all__ = ["Failure", "Input", "chosen", "each_of_mine", "find_images", "model_scores", "named", "report_failures"]

logger = logging.getLogger(__name__)


class Input(NamedTuple):
    """One image file.

    Attributes:
        path: of the file.
        name: of its results: the stem of the file, or more of its path where stems repeat.
    """

    path: Path
    name: str


class Failure(NamedTuple):
    """An image that could not be used.

    Attributes:
        path: of the file.
        reason: the first line of the error.
    """

    path: str
    reason: str


def chosen(task: Any, data: Any) -> tuple[list[Input], list[str] | None]:
    """The images to work on: those of ``task.input``, or else the test split.

    Returns:
        The files, and for scenes of the test split the class of each.

    Raises:
        ConfigError: ``task.input`` names no image.
    """
    if task.input is not None:
        return named(find_images(task.input)), None
    inputs = named([Path(sample[0]) for sample in data.test.samples])
    return inputs, None if data.per_pixel else [data.classes[sample[1]] for sample in data.test.samples]


def find_images(wanted: str) -> list[Path]:
    """The image files that ``task.input`` means, sorted.

    Args:
        wanted: a file, whatever its suffix; a folder: all images in it and below it; or a glob (``**`` included).

    Raises:
        ConfigError: there are none.
    """
    path = Path(wanted).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        found = [Path(file) for file in files_below(path)]
        what = f"a folder without images ({', '.join(SUFFIXES)})"
    else:
        found = [file for file in map(Path, glob.glob(str(path), recursive=True)) if file.is_file()]  # noqa: PTH207 - absolute patterns too
        what = "neither a file nor a folder, and as a glob it matches no file"
    if not found:
        raise ConfigError(f"task.input={wanted} is {what}; give an image, a folder of images or a glob, in quotes")
    return sorted(found)


def named(paths: Sequence[Path]) -> list[Input]:
    """A name for each file, by which no two results meet, on file systems that ignore case either.

    A stem that occurs once is the name. One that repeats becomes the path from the folder that all share, with ``_``
    between its parts and before the suffix; where these still meet, a number follows.
    """
    count = Counter(path.stem.lower() for path in paths)
    shared = os.path.commonpath([path.absolute().parent for path in paths])
    taken, found = set(), []
    for path in paths:
        name = path.stem
        if count[name.lower()] > 1:
            name = "_".join(path.absolute().relative_to(shared).with_suffix("").parts) + path.suffix.replace(".", "_")
        unique, number = name, 2
        while unique.lower() in taken:
            unique, number = f"{name}_{number}", number + 1
        taken.add(unique.lower())
        found.append(Input(path, unique))
    return found


def model_scores(session: Session, model: Any, image: torch.Tensor) -> torch.Tensor:
    """Logits of images, float32, without gradients and in the run's precision.

    Args:
        session: the session.
        model: on its device.
        image: (B, C, H, W), 0..255, on any device.

    Returns:
        (B, K), or (B, K, H, W), on the model's device.
    """
    batch = preprocessed(model, {"image": image.to(session.device)})
    with torch.no_grad(), session.backend.autocast(session.config.precision):
        logits: torch.Tensor = forward(model, batch, "tensor").float()
    session.backend.end_batch()
    return logits


def each_of_mine(session: Session, inputs: Sequence[Input], work: Callable[[int, Input], Any]) -> list[Failure]:
    """Do this rank's share of the files: every ``world_size``-th, so that large neighbours do not meet on one rank.

    An image that cannot be read is logged and does not stop the others; other errors do.

    Args:
        session: for the place of this rank.
        inputs: all files, the same on every rank.
        work: called with the number of a file and the file.

    Returns:
        The images that could not be used.
    """
    failures = []
    for number in range(session.info.rank, len(inputs), session.info.world_size):
        try:
            work(number, inputs[number])
        except DataError as error:
            reason = str(error).splitlines()[0]
            logger.error("cannot use %s: %s", inputs[number].path, reason)
            failures.append(Failure(str(inputs[number].path), reason))
    return failures


def report_failures(failures: Sequence[Failure], total: int) -> None:
    """Refuse to call a run successful in which images failed.

    Args:
        failures: of all ranks.
        total: images in all.

    Raises:
        RunError: there are failures; says which.
    """
    if failures:
        lines = [f"{failure.path}: {failure.reason}" for failure in failures[:NAMED_FILES]]
        more = [f"and {len(failures) - NAMED_FILES} more; all are in the logs"][: len(failures) > NAMED_FILES]
        hint = "; the others are done. Repair or remove these" if len(failures) < total else ""
        raise RunError("\n  ".join([f"{len(failures)} of {total} images could not be used{hint}", *lines, *more]))
