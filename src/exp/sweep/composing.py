"""Composes the jobs of a sweep fast: Hydra composes the first job of a kind, the others are copies with other values.

Jobs are of one kind if they set the same keys and choose the same files of the config groups, so that they differ in
plain values only. A job that does anything else (adds or deletes keys, sets lists, dictionaries or interpolations) is
composed by Hydra.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from typing import TYPE_CHECKING, Any, Sequence

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import OverrideType
from omegaconf import OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

if TYPE_CHECKING:
    from omegaconf import DictConfig

from exp.config.compose import make_paths_absolute
from exp.launcher.freeze import compose_run

# Keys whose value decides on other values, too, for example because it selects a file or a backend.
_STRUCTURAL_KEYS = ("backend", "experiment", "hydra", "init_from", "output_dir", "record", "task")


class Composer:
    """Replaces Hydra's config loader while a sweep is composed.

    Args:
        loader: Hydra's config loader, to which other attributes are forwarded.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        parser = OverridesParser.create(config_loader=loader)
        self._parse = functools.lru_cache(maxsize=None)(lambda text: parser.parse_overrides([text])[0])
        self._is_group = functools.lru_cache(maxsize=None)(lambda key: bool(loader.repository.group_exists(key)))
        self._templates: dict[Any, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def load_sweep_config(self, master_config: DictConfig, sweep_overrides: Sequence[str]) -> Any:
        """Called by a sweeper to check all jobs before it launches them; :meth:`config_for_job` composes each later."""
        return master_config

    def config_for_job(self, master_config: DictConfig, overrides: Sequence[str], number: int) -> Any:
        """Compose a job's configuration and prepare it (:func:`exp.launcher.freeze.compose_run`).

        Args:
            master_config: configuration of the whole sweep.
            overrides: of the job.
            number: Hydra's number of the job, from 0.

        Raises:
            HydraException: Hydra cannot compose the job.
            ExpError: raised by :func:`exp.launcher.freeze.compose_run`.
        """
        template_key, values = self._template_key(overrides)
        # If a value does not fit, fall through to Hydra, whose error message says what is wrong.
        with contextlib.suppress(OmegaConfBaseException):
            if template_key in self._templates:
                config = copy.deepcopy(self._templates[template_key])
                for key, value in values.items():
                    OmegaConf.update(config, key, value)
                make_paths_absolute(config)
                return config
        config = self._loader.load_sweep_config(master_config, list(overrides))
        with read_write(config), open_dict(config):
            config.hydra.job.id, config.hydra.job.num = str(number), number
            HydraConfig.instance().set_config(config)
            del config["hydra"]
        config = compose_run(config, self.task_overrides(overrides))
        if template_key is not None and "${hydra:" not in str(OmegaConf.to_container(config)):
            self._templates.setdefault(template_key, copy.deepcopy(config))
        return config

    def task_overrides(self, overrides: Sequence[str]) -> list[str]:
        """The overrides that are not of keys of Hydra itself."""
        return [override for override in overrides if not self._parse(override).is_hydra_override()]

    def _template_key(self, overrides: Sequence[str]) -> tuple[Any, dict[str, Any]]:
        """The kind of a job, and the plain values that it sets.

        Returns:
            Its overrides without plain values (None: Hydra must compose the job), and these values by key.
        """
        template: list[str] = []
        values: dict[str, Any] = {}
        for text in overrides:
            override = self._parse(text)
            key, value = override.key_or_group, override.value()
            is_scalar = value is None or (isinstance(value, (bool, int, float, str)) and "${" not in str(value))
            if override.type != OverrideType.CHANGE or override.package is not None or not is_scalar:
                return None, {}
            if value is None or key.partition(".")[0] in _STRUCTURAL_KEYS or self._is_group(key):
                template.append(text)
            else:
                template.append(key)
                values[key] = value
        return tuple(template), values
