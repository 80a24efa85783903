"""The logger interface: where the figures of a run go beside ``metrics.jsonl``."""

from __future__ import annotations

import abc
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmengine.registry import VISBACKENDS
from mmengine.visualization.vis_backend import BaseVisBackend
from omegaconf import OmegaConf

from exp.config.resolve import create, make
from exp.engine.registries import registered
from exp.errors import ConfigError

if TYPE_CHECKING:
    from exp.session import Session

__all__ = ["Logger", "build_loggers"]


class Logger(BaseVisBackend):
    """A place for figures. One of MMEngine's visualisation backends, with the one method that exp calls.

    A configuration names it in ``logger.vis_backends`` by ``_target_``; the other keys there are its constructor's
    arguments. It is made on rank 0 alone, before the first step. MMEngine's own, and others of its registry, are named
    by ``type``; whatever inherits ``BaseVisBackend`` will do.

    Args:
        save_dir: a folder for what it writes; None: it needs none.
    """

    def __init__(self, save_dir: str | None = None) -> None:
        super().__init__(save_dir)

    @abc.abstractmethod
    def log(self, values: dict[str, float], step: int) -> None:
        """Take in figures; what it raises ends the run.

        Args:
            values: by name, such as ``train/loss``, ``val/mse``, ``test/mse``: a loss every ``log_every`` steps, the
                metrics after each validation and after the test.
            step: optimizer steps completed.
        """

    def close(self) -> None:
        """The run has ended."""

    def _init_env(self) -> None:
        """MMEngine's call before the first figure: constructors do it here."""

    @property
    def experiment(self) -> Any:
        """What MMEngine hands to hooks that ask for the object behind: this one."""
        return self

    def add_scalars(self, scalar_dict: dict[str, Any], step: int = 0, file_path: str | None = None, **_: Any) -> None:
        """MMEngine's call for :meth:`log`."""
        self.log({name: float(value) for name, value in scalar_dict.items()}, step)

    def add_scalar(self, name: str, value: Any, step: int = 0, **_: Any) -> None:
        """One figure, of a hook of MMEngine's."""
        self.log({name: float(value)}, step)


def build_loggers(session: Session) -> list[Any]:
    """The loggers of the configuration, on rank 0; on others there are none.

    Raises:
        ConfigError: one is none, or would write outside of the run folder; names the key.
    """
    if not session.distributed.is_main:
        return []
    folder = session.folder.path
    found: list[Any] = []
    for number, config in enumerate(session.config.logger.vis_backends):
        key = f"logger.vis_backends[{number}]"
        content: Any = OmegaConf.to_container(config, resolve=True)
        _check_paths(key, content, folder)
        if "_target_" in content:
            found.append(create(content, BaseVisBackend, key))
            continue
        content["save_dir"] = str(folder / (content.get("save_dir") or "vis_data"))
        name = str(content.pop("type", None))
        found.append(make(registered(f"{key}.type", name, VISBACKENDS, BaseVisBackend), key, content))
    return found


def _check_paths(key: str, value: Any, folder: Path) -> None:
    """Refuse a path that leads out of the run folder: a configuration may be a stranger's."""
    if isinstance(value, (dict, list)):
        for name, item in value.items() if isinstance(value, dict) else enumerate(value):
            _check_paths(f"{key}.{name}" if isinstance(value, dict) else f"{key}[{name}]", item, folder)
    elif isinstance(value, str) and (value.startswith(("/", "~", "file:")) or ".." in Path(value).parts):
        path = folder / Path(value.partition("file:")[2] or value).expanduser()
        if folder not in Path(os.path.normpath(path)).parents:
            raise ConfigError(f"{key}={value} lies outside of the run folder; use a path below ${{output_dir}}")
