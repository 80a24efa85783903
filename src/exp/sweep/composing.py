"""Composes the jobs of a sweep: what they share once, and for each job only what it changes.

Jobs whose command lines set the same keys, and choose the same files of the config groups, differ in plain values only.
The first of them is composed by Hydra; the others are copies with other values in these keys. A job that does anything
else (adds or deletes keys, sets lists, dictionaries or interpolations, has values of Hydra's own) is composed by Hydra.
"""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Sequence

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from omegaconf import OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from exp.freezing import prepare

if TYPE_CHECKING:
    from omegaconf import DictConfig

__all__ = ["Composer"]

# Keys of which more depends than their own value: whose file is read, which backend there is.
_DECIDE = ("backend", "experiment", "hydra", "init_from", "output_dir", "record", "task")


@dataclass
class _Shape:
    """What jobs that set the same keys share."""

    composed: Any
    """By Hydra; its values are those of the latest job."""
    prepared: Any = None
    """What :func:`exp.freezing.prepare` made of the first of them."""
    by_hydra: bool = False
    """It has values that change with the job's number."""


class Composer:
    """Stands in for Hydra's loader of configurations while a sweep is composed.

    Args:
        loader: Hydra's.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._parser = OverridesParser.create(config_loader=loader)
        self._parsed: dict[str, Override] = {}
        self._groups: dict[str, bool] = {}
        self._shapes: dict[Any, _Shape] = {}
        self._shown: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def load_sweep_config(self, master_config: DictConfig, sweep_overrides: Sequence[str]) -> Any:
        """A job's configuration, as Hydra has it; it holds until the next call.

        Args:
            master_config: of the whole sweep.
            sweep_overrides: of the job.

        Raises:
            HydraException: as Hydra composes it.
        """
        return self._compose(master_config, sweep_overrides)[0]

    def prepared(self, master_config: DictConfig, overrides: Sequence[str], number: int) -> Any:
        """What :func:`exp.freezing.prepare` makes of a job's configuration.

        Args:
            master_config: of the whole sweep.
            overrides: of the job.
            number: Hydra's, from 0.

        Raises:
            HydraException: as Hydra composes it.
            ExpError: as :func:`exp.freezing.prepare`.
        """
        shape = self._shapes.get(self._key(overrides))
        if shape is not None and shape.prepared is not None:
            config = copy.deepcopy(shape.prepared)
            # What does not fit is composed by Hydra, as if it were alone: that says what is wrong.
            with contextlib.suppress(OmegaConfBaseException):
                self._set_values(config, overrides)
                self._show(shape.composed)
                return config
        composed, shape = self._compose(master_config, overrides)
        with open_dict(composed):
            composed.hydra.job.id, composed.hydra.job.num = str(number), number
        self._shown = None
        self._show(composed)
        config = copy.deepcopy(composed)
        with read_write(config), open_dict(config):
            del config["hydra"]
        prepared = prepare(config, self.task_overrides(overrides))
        if shape is not None and not shape.by_hydra and shape.prepared is None:
            shape.by_hydra = "${hydra:" in str(OmegaConf.to_container(prepared))
            shape.prepared = None if shape.by_hydra else copy.deepcopy(prepared)
        return prepared

    def _show(self, composed: Any) -> None:
        """Let :class:`HydraConfig` have the choices in the config groups."""
        if composed is not self._shown:
            HydraConfig.instance().set_config(composed)
            self._shown = composed

    def task_overrides(self, overrides: Sequence[str]) -> list[str]:
        """Those that are not Hydra's own."""
        return [override for override in overrides if not self._parse(override).is_hydra_override()]

    def _compose(self, master: DictConfig, overrides: Sequence[str]) -> tuple[Any, _Shape | None]:
        """A job's configuration, and what it shares with others; None: nothing."""
        key = self._key(overrides)
        shape = self._shapes.get(key) if key is not None else None
        if shape is not None and not shape.by_hydra:
            try:
                self._set_values(shape.composed, overrides)
            except OmegaConfBaseException:
                # Hydra says what is wrong with it, and the next job of this shape sets the same keys.
                return self._loader.load_sweep_config(master, list(overrides)), None
            return shape.composed, shape
        composed = self._loader.load_sweep_config(master, list(overrides))
        if key is None or shape is not None:
            return composed, shape
        if any(_has_members(OmegaConf.select(composed, name, throw_on_missing=False)) for name in key[1]):
            return composed, None  # null for a list, say
        self._shapes[key] = _Shape(composed)
        return composed, self._shapes[key]

    def _key(self, overrides: Sequence[str]) -> Any:
        """What is the same in all jobs of a shape: the overrides that decide on it, and the keys of the plain ones."""
        deciding, plain = [], []
        for text in overrides:
            override = self._parse(text)
            if self._is_plain(override):
                plain.append(override.key_or_group)
            else:
                deciding.append(text)
        for text in deciding:
            override = self._parse(text)
            changed = override.key_or_group
            if not self._is_group(changed) and any(_related(changed, name) for name in plain):
                return None
        return tuple(deciding), tuple(plain)

    def _is_plain(self, override: Override) -> bool:
        key = override.key_or_group
        if override.type != OverrideType.CHANGE or override.package is not None or self._is_group(key):
            return False
        value = override.value()
        plain = value is None or isinstance(value, (bool, int, float, str))
        return plain and "${" not in str(value) and key.partition(".")[0] not in _DECIDE

    def _is_group(self, key: str) -> bool:
        if key not in self._groups:
            self._groups[key] = "." not in key and bool(self._loader.repository.group_exists(key))
        return self._groups[key]

    def _parse(self, text: str) -> Override:
        if text not in self._parsed:
            (self._parsed[text],) = self._parser.parse_overrides([text])
        return self._parsed[text]

    def _set_values(self, config: Any, overrides: Sequence[str]) -> None:
        for text in overrides:
            override = self._parse(text)
            if self._is_plain(override):
                OmegaConf.update(config, override.key_or_group, override.value(), merge=True)


def _has_members(node: Any) -> bool:
    return OmegaConf.is_config(node)


def _related(key: str, other: str) -> bool:
    """Whether one of two keys is the other, or lies below it."""
    return f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")
