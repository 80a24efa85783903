"""Composes the jobs of a sweep: what they share once, and for each job only what it changes.

Jobs whose command lines set the same keys, and choose the same files of the config groups, differ in plain values only.
The first of them is composed by Hydra; the others are copies with other values in these keys. A job that does anything
else (adds or deletes keys, sets lists, dictionaries or interpolations, has values of Hydra's own) is composed by Hydra.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from typing import TYPE_CHECKING, Any, Sequence

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from omegaconf import OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from exp.frozen import prepare

if TYPE_CHECKING:
    from omegaconf import DictConfig

__all__ = ["Composer"]

# Keys of which more depends than their own value: whose file is read, which backend there is.
_DECIDE = ("backend", "experiment", "hydra", "init_from", "output_dir", "record", "task")


class Composer:
    """Stands in for Hydra's loader of configurations while a sweep is composed.

    Args:
        loader: Hydra's.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._parser = OverridesParser.create(config_loader=loader)
        self._parse = functools.lru_cache(maxsize=None)(lambda text: self._parser.parse_overrides([text])[0])
        self._is_group = functools.lru_cache(maxsize=None)(lambda key: bool(loader.repository.group_exists(key)))
        self._checked: set[Any] = set()
        self._shared: dict[Any, tuple[Any, Any] | None] = {}
        """What Hydra has composed for the first job of a kind, and what became of it; None: each is Hydra's."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def load_sweep_config(self, master_config: DictConfig, sweep_overrides: Sequence[str]) -> Any:
        """What a sweeper checks its jobs by: the first of each kind is composed.

        Raises:
            HydraException: as Hydra composes it.
        """
        kind = self._kind(sweep_overrides)
        if kind is None or kind not in self._checked:
            self._loader.load_sweep_config(master_config, list(sweep_overrides))
            self._checked.add(kind)
        return master_config

    def prepared(self, master_config: DictConfig, overrides: Sequence[str], number: int) -> Any:
        """What :func:`exp.frozen.prepare` makes of a job's configuration.

        Args:
            master_config: of the whole sweep.
            overrides: of the job.
            number: Hydra's, from 0.

        Raises:
            HydraException: as Hydra composes it.
            ExpError: as :func:`exp.frozen.prepare`.
        """
        kind = self._kind(overrides)
        shared = self._shared.get(kind)
        # What does not fit is composed by Hydra, as if it were alone: that says what is wrong.
        with contextlib.suppress(OmegaConfBaseException):
            if shared is not None:
                config = copy.deepcopy(shared[1])
                for override in map(self._parse, overrides):
                    if self._is_plain(override):
                        OmegaConf.update(config, override.key_or_group, override.value(), merge=True)
                HydraConfig.instance().set_config(shared[0])  # for the choices in the config groups
                return config
        composed = self._loader.load_sweep_config(master_config, list(overrides))
        with open_dict(composed):
            composed.hydra.job.id, composed.hydra.job.num = str(number), number
        HydraConfig.instance().set_config(composed)
        config = copy.deepcopy(composed)
        with read_write(config), open_dict(config):
            del config["hydra"]
        prepared = prepare(config, self.task_overrides(overrides))
        if kind is not None and kind not in self._shared:
            by_number = "${hydra:" in str(OmegaConf.to_container(prepared))
            # An override by null, say, of what is a list or a dictionary.
            whole = any(OmegaConf.is_config(OmegaConf.select(composed, key)) for key in self._plain_keys(overrides))
            self._shared[kind] = None if by_number or whole else (composed, copy.deepcopy(prepared))
        return prepared

    def task_overrides(self, overrides: Sequence[str]) -> list[str]:
        """Those that are not Hydra's own."""
        return [override for override in overrides if not self._parse(override).is_hydra_override()]

    def _kind(self, overrides: Sequence[str]) -> Any:
        """What jobs that can share have in common: their overrides, less the values of the plain ones."""
        parsed, plain = [self._parse(text) for text in overrides], self._plain_keys(overrides)
        changed = [each.key_or_group for each in parsed if not self._is_plain(each)]
        if any(_related(key, each) for key in plain for each in changed if not self._is_group(each)):
            return None
        return tuple(each.key_or_group if self._is_plain(each) else each.input_line for each in parsed)

    def _plain_keys(self, overrides: Sequence[str]) -> list[str]:
        return [each.key_or_group for each in map(self._parse, overrides) if self._is_plain(each)]

    def _is_plain(self, override: Override) -> bool:
        key, value = override.key_or_group, override.value()
        decides = key.partition(".")[0] in _DECIDE or self._is_group(key) or override.package is not None
        plain = value is None or isinstance(value, (bool, int, float, str))
        return override.type == OverrideType.CHANGE and not decides and plain and "${" not in str(value)


def _related(key: str, other: str) -> bool:
    """Whether one of two keys is the other, or lies below it."""
    return f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")
