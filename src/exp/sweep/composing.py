"""Composes the jobs of a sweep fast: Hydra composes the first job of a kind, the others are copies with other values.

Jobs are of one kind if they set the same keys and choose the same files of the config groups, so that they differ in
plain values only. A job that does anything else (adds or deletes keys, sets lists, dictionaries or interpolations, or
sets keys of Hydra) is composed by Hydra.
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

# Keys whose value decides on more than themselves, such as which file is read or which backend is used.
_DECIDE = ("backend", "experiment", "hydra", "init_from", "output_dir", "record", "task")


class Composer:
    """Replaces Hydra's config loader while a sweep is composed.

    Args:
        loader: Hydra's config loader, to which other attributes are forwarded.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._parser = OverridesParser.create(config_loader=loader)
        self._parse = functools.lru_cache(maxsize=None)(lambda text: self._parser.parse_overrides([text])[0])
        self._is_group = functools.lru_cache(maxsize=None)(lambda key: bool(loader.repository.group_exists(key)))
        self._checked: set[Any] = set()
        self._shared: dict[Any, tuple[Any, Any] | None] = {}
        """By kind: the first job's configuration as Hydra composed it, and prepared; None: it cannot be reused."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def load_sweep_config(self, master_config: DictConfig, sweep_overrides: Sequence[str]) -> Any:
        """Called by a sweeper to check a job; composes only the first job of each kind.

        Raises:
            HydraException: Hydra cannot compose the job.
        """
        kind = self._kind(sweep_overrides)
        if kind is None or kind not in self._checked:
            self._loader.load_sweep_config(master_config, list(sweep_overrides))
            self._checked.add(kind)
        return master_config

    def prepared(self, master_config: DictConfig, overrides: Sequence[str], number: int) -> Any:
        """Compose a job's configuration and prepare it (:func:`exp.frozen.prepare`).

        Args:
            master_config: configuration of the whole sweep.
            overrides: of the job.
            number: Hydra's number of the job, from 0.

        Raises:
            HydraException: Hydra cannot compose the job.
            ExpError: raised by :func:`exp.frozen.prepare`.
        """
        kind = self._kind(overrides)
        shared = self._shared.get(kind)
        # If a value does not fit, fall through to Hydra, whose error message says what is wrong.
        with contextlib.suppress(OmegaConfBaseException):
            if shared is not None:
                config = copy.deepcopy(shared[1])
                for override in map(self._parse, overrides):
                    if self._is_plain(override):
                        OmegaConf.update(config, override.key_or_group, override.value(), merge=True)
                HydraConfig.instance().set_config(shared[0])  # the choices in the config groups are read from it
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
            # For example, null for a key whose value is a list or a dictionary.
            whole = any(OmegaConf.is_config(OmegaConf.select(composed, key)) for key in self._plain_keys(overrides))
            self._shared[kind] = None if by_number or whole else (composed, copy.deepcopy(prepared))
        return prepared

    def task_overrides(self, overrides: Sequence[str]) -> list[str]:
        """The overrides that are not of keys of Hydra itself."""
        return [override for override in overrides if not self._parse(override).is_hydra_override()]

    def _kind(self, overrides: Sequence[str]) -> Any:
        """The kind of a job: its overrides, without the values of plain keys; None: Hydra must compose the job."""
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
    """Whether two dotted keys are equal, or one is below the other."""
    return f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")
