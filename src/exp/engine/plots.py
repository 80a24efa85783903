"""Pictures of a run, written as ``figures`` of the configuration asks for."""

from __future__ import annotations

import logging
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, Callable, Mapping

from exp.engine.fsdp import is_sharded
from exp.engine.wrapper import unwrapped
from exp.runs.files import write_atomically

if TYPE_CHECKING:
    from exp.draw.figure import Picture
    from exp.metrics import Evaluator
    from exp.session import Session

__all__ = ["PictureWriter", "draw_extras", "training_pictures"]

logger = logging.getLogger(__name__)
_NAMED = 20  # characters


class PictureWriter:
    """Writes pictures below the run folder, and says once which characters none of the installed fonts has.

    Args:
        session: the session.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self._reported: set[str] = set()

    def write(self, name: str, picture: Picture) -> list[str]:
        """Write one picture.

        Args:
            name: of the PNG file, below the run folder; another format has its own suffix.
            picture: a figure, pixels, or a PNG file.

        Returns:
            The files, below the run folder; none with ``plots=false``.
        """
        from exp.draw.figure import encoded, undrawable  # matplotlib's

        files: list[str] = []
        if not self.session.config.plots:
            return files
        for form, content in encoded(picture, self.session.config.figures).items():
            files.append(str(PurePosixPath(name).with_suffix(f".{form}")))
            write_atomically(self.session.folder.path / files[-1], content)
        lacking = sorted(undrawable() - self._reported)
        if lacking:
            self._reported.update(lacking)
            shown = " ".join(lacking[:_NAMED]) + f" and {len(lacking) - _NAMED} more" * (len(lacking) > _NAMED)
            self.session.say(f"pictures: no installed font has {shown}; install one, such as Noto Sans CJK, for these")
        return files

    def write_all(self, pictures: Mapping[str, Picture]) -> list[str]:
        """Write several, by name in ``plots/``; returns the files, below the run folder."""
        return [file for name, picture in pictures.items() for file in self.write(f"plots/{name}", picture)]


def draw_extras(session: Session, make: Callable[[], Mapping[str, Picture]]) -> None:
    """Draw and write pictures on rank 0; an error of theirs is reported, and does not cost the result."""
    if session.config.plots and session.distributed.is_main:
        try:
            PictureWriter(session).write_all(make())
        except Exception as error:
            logger.exception("plots")
            session.say(f"plots: not drawn: {type(error).__name__}: {error}; the log of rank 0 has the traceback")


def training_pictures(session: Session, model: Any, evaluator: Evaluator) -> dict[str, Picture]:
    """``curves.png``, and the pictures of the data.

    Args:
        session: the session.
        model: wrapped or not, on the session's device, with the best weights; is left in eval mode.
        evaluator: after the test.
    """
    from exp.draw.curves import training_curves

    pictures: dict[str, Picture] = {}
    if session.folder.metrics.is_file():
        metric, greater = evaluator.metric_name, evaluator.greater_is_better
        pictures["curves.png"] = training_curves(session.folder.records(), metric, greater, session.config.name)
    draw = session.extras.pictures
    if draw is not None and is_sharded(unwrapped(model)):  # a forward pass would wait for the other ranks
        session.say("plots: no pictures of predictions with wrapper=fsdp; task=predict draws them")
    elif draw is not None:
        pictures.update(draw(model, evaluator))
    return pictures
