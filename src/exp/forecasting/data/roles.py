"""What the series of a file are for: seen, forecast, or known ahead. Imports neither torch nor pandas nor numpy."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Iterable, Mapping, Sequence

from exp.data.places import shortened
from exp.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["MISSING_VALUES", "Roles"]

MISSING_VALUES = ("refuse", "mask")


@dataclass(frozen=True)
class Roles:
    """Which series of a file are seen, which are forecast, and whether cells may be empty.

    Attributes:
        inputs: those that are read, in this order; None: all, in the order of the file.
        targets: those that are forecast and scored; None: all that are read, but for covariates.
        covariates: those whose future values are known; None: there are none, and the future calendar is not given.
        masks: whether cells may be empty.
    """

    inputs: tuple[str, ...] | None = None
    targets: tuple[str, ...] | None = None
    covariates: tuple[str, ...] | None = None
    masks: bool = False

    @classmethod
    def of(
        cls,
        inputs: Iterable[object] | None = None,
        targets: Iterable[object] | None = None,
        covariates: Iterable[object] | None = None,
        missing: str = "refuse",
    ) -> Roles:
        """As the keys ``data.inputs``, ``data.targets``, ``data.covariates`` and ``data.missing`` say.

        Raises:
            DataError: ``missing`` is none of :data:`MISSING_VALUES`; a list has a name twice, or none where it must.
        """
        if missing not in MISSING_VALUES:
            raise DataError(f"data.missing={missing} is not one of {', '.join(MISSING_VALUES)}")
        lists: dict[str, tuple[str, ...] | None] = {}
        for key, given in (("inputs", inputs), ("targets", targets), ("covariates", covariates)):
            names = None if given is None else tuple(str(name).strip() for name in given)
            if names is not None:
                twice = next((name for index, name in enumerate(names) if name in names[:index]), None)
                if twice is not None:
                    raise DataError(f"data.{key} has {twice!r} twice; name each column once")
                if not names and key != "covariates":
                    raise DataError(f"data.{key}=[] names no column; name one, or set data.{key}=null for all")
            lists[key] = names
        return cls(lists["inputs"], lists["targets"], lists["covariates"], missing == "mask")

    @classmethod
    def of_keys(cls, data: Mapping[str, Any]) -> Roles:
        """As the keys of ``data`` in the configuration say; those that are not there have their defaults."""
        return cls.of(data.get("inputs"), data.get("targets"), data.get("covariates"), data.get("missing", "refuse"))

    def selected(self, path: Path, names: Sequence[str], channels: int | None) -> list[int]:
        """Positions of the series that are read, in the order in which they are wanted.

        Args:
            path: for messages.
            names: of all series of the file.
            channels: ``data.channels``, the number of those that are read; None: any.

        Raises:
            DataError: a name is not there, a series has two roles, nothing is left to be forecast, or the number of
                series is not ``channels``.
        """
        positions = list(range(len(names)))
        if self.inputs is not None:
            self._require(path, "inputs", names, names)
            positions = [list(names).index(name) for name in self.inputs]
            if channels is not None and channels != len(positions):
                raise DataError(
                    f"data.inputs names {len(positions)} columns, but data.channels={channels}; set "
                    f"data.channels={len(positions)}"
                )
        read = [names[position] for position in positions]
        for key in ("targets", "covariates"):
            self._require(path, key, read, names)
        both = [name for name in self.targets or () if name in (self.covariates or ())]
        if both:
            raise DataError(f"{both[0]!r} is in data.targets and in data.covariates; what is known is not forecast")
        if not self.scored(read):
            raise DataError("data.covariates names every column; leave one to be forecast")
        return positions

    def _require(self, path: Path, key: str, names: Sequence[str], in_file: Sequence[str]) -> None:
        for name in getattr(self, key) or ():
            if name in names:
                continue
            if name in in_file:
                raise DataError(f"data.{key}: {name!r} is not among data.inputs ({shortened(names)}); add it there")
            near = difflib.get_close_matches(name, names, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise DataError(f"data.{key}: {path} has no column {name!r}{hint}; its series are {shortened(names)}")

    def scored(self, names: Sequence[str]) -> list[int]:
        """Positions among ``names``, the series that are read, of those that are forecast."""
        known = self.covariates or ()
        return [
            position
            for position, name in enumerate(names)
            if (name not in known if self.targets is None else name in self.targets)
        ]

    def ahead(self, names: Sequence[str]) -> list[int]:
        """Positions among ``names`` of the covariates, in the order in which they are named."""
        return [list(names).index(name) for name in self.covariates or ()]

    def hides(self, names: Sequence[str]) -> bool:
        """Whether a cell can be without truth: not forecast, or empty."""
        return self.masks or len(self.scored(names)) < len(names)
