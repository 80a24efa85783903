"""Hydra looks for config groups in the packages of installed plugins, after exp's own and the user's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hydra.plugins.search_path_plugin import SearchPathPlugin

from exp.plugins import installed

if TYPE_CHECKING:
    from hydra.core.config_search_path import ConfigSearchPath

__all__ = ["PluginConfigs"]


class PluginConfigs(SearchPathPlugin):
    """Adds them."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Called by Hydra before it composes."""
        for name, plugin in installed().items():
            if plugin.config is not None:
                search_path.append(f"exp-{name}", f"pkg://{plugin.config}")
