"""Where Hydra finds configurations: the user's folders, those of plugins, and choices that need no file.

Only :class:`_Files` reads the users' YAML files, so it reports mistakes in them.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import io
import os
import re
import secrets
from collections import ChainMap
from pathlib import Path
from typing import TYPE_CHECKING, Any, Iterator, Mapping, Sequence

from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import MISSING, DictConfig, OmegaConf

from exp.config.resolve import user
from exp.config.schema import ExpConfig, LauncherConfig
from exp.errors import ConfigError, nearest
from exp.plugins import installed
from exp.runs.files import read_yaml

if TYPE_CHECKING:
    from hydra.core.config_search_path import ConfigSearchPath

_UNTYPED_SECTIONS = ("backend", "launcher", "wrapper", "logger", "checkpoint", "sweep", "debug", "figures", "record")
"""Sections that Hydra composes without their types and defaults, so that ``--cfg job`` shows what is set, and other
launchers can add keys; :func:`exp.config.compose.typed` adds both, and refuses a wrong key or type."""
_GROUPS = ("launcher", "task", "data", "model")
"""Sections whose keys depend on the choice."""
_PACKAGE = re.compile(r"(?:[ \t]*(?:#.*)?\n)*?[ \t]*#[ \t]*@package[ \t]+(\S+)")
_HYDRA_KEYS = {
    "run": "output_dir=...",
    "sweep": "output_dir=<the folder of the sweep>, in which jobs are numbered",
    "output_subdir": "output_dir=...",
    "mode": "-m",
    "launcher": "launcher=...; exp runs the jobs of a sweep itself",
    "verbose": "the files in logs/ of the run folder",
    "job_logging": "the files in logs/ of the run folder",
    "hydra_logging": "the files in logs/ of the run folder",
    "job.env_set": "backend.env.NAME=...",
    "job.env_copy": "backend.env.NAME=...",
    "job.chdir": "output_dir=...; runs stay in the current folder",
    "callbacks": "hooks=[{type: ...}]",
}
"""Keys of Hydra without effect in exp, each with its replacement."""


def check_hydra_key(key: str, file: str = "") -> None:
    """Refuse a key of Hydra's own configuration that has no effect in exp.

    Args:
        key: such as ``hydra.run.dir`` or ``hydra/launcher``; keys that are not of Hydra are allowed.
        file: the file that sets it, with a colon, for the message; empty: the command line.

    Raises:
        ConfigError: the key is neither ``hydra.searchpath`` nor one of the sweeper.
    """
    match = re.match(r"hydra[./]([\w./]*)", key)
    if match is None or re.match(r"(searchpath|sweeper)\b", match.group(1)):
        return
    name = match.group(1).replace("/", ".")
    replacement = next((use for prefix, use in _HYDRA_KEYS.items() if f"{name}.".startswith(f"{prefix}.")), None)
    hint = "leave it out" if replacement is None else f"use {replacement}"
    raise ConfigError(f"{file}{key} has no effect in exp", f"{hint} (of Hydra's own keys, only hydra.sweeper is used)")


def register(folders: Sequence[str] = ()) -> None:
    """Register with Hydra the configurations of plugins, the choices without files, and resolvers.

    ``${run_id:}`` is a short random id, the same everywhere in one configuration; ``${if_null:x,a,b}`` is ``a`` if
    ``x`` is null, else ``b``.

    Args:
        folders: the user's folders of configurations, and packages as ``pkg://<name>``.

    Raises:
        ConfigError: there is no such folder or package.
    """
    OmegaConf.register_new_resolver("run_id", lambda: secrets.token_hex(3), use_cache=True, replace=True)
    OmegaConf.register_new_resolver(
        "if_null", lambda x, then, otherwise: then if x is None else otherwise, replace=True
    )
    for plugin in (_SearchPath, _Dataclasses, _Files):
        Plugins.instance().register(plugin)
    user.folders = [*folders]
    _refuse_hidden_files([Path(path) for folder in folders for path in _folder_paths(folder)])


def conf_folder() -> Path:
    """The folder of exp's own configurations."""
    return Path(str(importlib.import_module("exp.conf").__file__)).parent


def _refuse_hidden_files(folders: Sequence[Path]) -> None:
    """Refuse a user's file that is never read, since exp's own choice of this name comes first.

    Raises:
        ConfigError: there is one.
    """
    own = conf_folder()
    for file in own.glob("*/**/*.yaml") if folders else ():
        path = file.relative_to(own)
        for hidden in [folder / path for folder in folders]:
            if hidden.is_file() and not hidden.samefile(file):
                choice = "=".join(path.with_suffix("").as_posix().rsplit("/", 1))
                raise ConfigError(f"{hidden} has the name of exp's own choice {choice}, which is used instead",
                                  "give your file another name", file=str(hidden))  # fmt: skip


def user_config_files() -> Iterator[Path]:
    """The YAML files in the user's folders. Classes named there are trusted, also if the config of a run names them."""
    folders = (folder for folder in user.folders if not folder.startswith("pkg://"))
    return (file for folder in folders for path in _folder_paths(folder) for file in Path(path).rglob("*.yaml"))


def _folder_paths(folder: str) -> list[str]:
    """The absolute paths of a folder, or of a package, which may have several."""
    scheme, _, name = folder.rpartition("://")
    if scheme == "pkg":
        spec = importlib.util.find_spec(name)
        if spec is None or not spec.submodule_search_locations:
            raise ConfigError(f"hydra.searchpath: there is no package {name}", "is its folder on PYTHONPATH?")
        return list(spec.submodule_search_locations)
    path = Path(os.path.abspath(Path(name).expanduser()))  # noqa: PTH100 - pathlib leaves `..` in it
    if scheme not in ("", "file"):
        raise ConfigError(f"hydra.searchpath: {folder} is neither a folder nor pkg://<a package>")
    if not path.is_dir():
        siblings = [sibling.name for sibling in path.parent.iterdir()] if path.parent.is_dir() else []
        raise ConfigError(f"there is no folder {name} of configurations{nearest(path.name, siblings)}")
    return [str(path)]


def _choices() -> Mapping[str, Any]:
    """Choices of config groups that need no file, by ``<group>/<name>``: a dataclass, an instance of one, or a dict.

    They are the schema, typed keys (under ``schema/``), and the model and data of the run in ``init_from``.
    """
    return ChainMap(user.run_choices, _fixed_choices())


@functools.lru_cache(maxsize=None)
def _fixed_choices() -> dict[str, Any]:
    untyped: list[Any] = [(name, Any, dataclasses.field(default_factory=dict)) for name in _UNTYPED_SECTIONS]
    schema = dataclasses.make_dataclass("Schema", untyped, bases=(ExpConfig,))
    return {"exp_schema": schema, **{f"schema/{name}": keys for name, keys in _structures().items()}}


@functools.lru_cache(maxsize=None)
def _structures() -> Mapping[str, type]:
    """The typed keys of launchers and plugins by ``<group>/<name>``; exp's own tasks are a plugin, too."""
    structures: dict[str, type] = {"launcher/base": LauncherConfig}
    for plugin in installed().values():
        structures.update(plugin.structures)
    extensions = [pair for plugin in installed().values() for pair in plugin.keys.items()]
    for name, keys in extensions:
        base = structures.get(name)
        if base is not None:  # the plugin that defines it loads
            structures[name] = dataclasses.make_dataclass(base.__name__, [], bases=(base, keys))
    return structures


def structure_of(target: str | None) -> type | None:
    """The dataclass of typed keys for a ``_target_``; None if there is none."""
    matching = (keys for keys in _structures().values() if getattr(keys, "_target_", MISSING) == target)
    return None if target in (None, MISSING) else next(matching, None)


def group_keys() -> list[str]:
    """The dotted keys of all typed choices, such as ``model.d_model``, without their members."""
    groups = ((name.rpartition("/")[0].replace("/", "."), keys) for name, keys in _structures().items())
    return [f"{group}.{field.name}" for group, keys in groups for field in dataclasses.fields(keys)]


def nested_groups() -> list[str]:
    """The groups within a section that plugins type, such as ``model/backbone``."""
    return sorted({name.rpartition("/")[0] for name in _structures() if name.count("/") > 1})


def task_class_by_name(name: str) -> type | None:
    """The class of ``task=<name>`` if exp or a plugin defines the task; None if only a YAML file does."""
    return _structures().get(f"task/{name}")


def open_dicts(structure: Any) -> DictConfig:
    """The OmegaConf node of a dataclass or of its instance; fields of type ``Dict`` accept new members.

    The default of such a field must be a dictionary, not null: OmegaConf cannot merge into a typed null.
    """
    node: DictConfig = OmegaConf.structured(structure)
    nodes: list[Any] = [(node, OmegaConf.to_container(node, resolve=False))]
    for child, content in nodes:
        if OmegaConf.get_type(child) is dict:
            OmegaConf.set_struct(child, False)
        nodes += [(child[key], value) for key, value in content.items() if isinstance(value, dict)]
    return node


class _SearchPath(SearchPathPlugin):
    """Adds to the search path the config groups of installed plugins, and the user's folders."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append the folders, and the source of choices without files; Hydra calls this before it composes."""
        packages = {f"exp-{name}": f"pkg://{plugin.config}" for name, plugin in installed().items() if plugin.config}
        for provider, folder in [*packages.items(), *(("command-line", folder) for folder in user.folders)]:
            for path in _folder_paths(folder):
                search_path.append(provider, f"{_Files.scheme()}://{path}")
        search_path.append("exp-dataclasses", f"{_Dataclasses.scheme()}://")


def _check_shapes(content: Mapping[str, Any], path: Path, section: Any = ExpConfig, prefix: str = "") -> None:
    """Refuse another value where a list or a dictionary belongs, for which Hydra's message names no key.

    Args:
        content: of a file, or of one section of it.
        path: of the file.
        section: the dataclass of the typed keys of ``content``.
        prefix: the key of the section, with a point.
    """
    factories: dict[str, Any] = {field.name: field.default_factory for field in dataclasses.fields(section)}
    if not prefix:
        factories.update(dict.fromkeys(("hydra", *_GROUPS), dict))
    for key, value in content.items():
        factory = factories.get(key)
        kind = dict if dataclasses.is_dataclass(factory) else factory
        if kind not in (list, dict) or str(value).startswith("${"):
            continue
        if not isinstance(value, kind):
            kinds, hint = "a list" if kind is list else "a dictionary", ""
            if prefix + key in _GROUPS and isinstance(value, str):
                hint = f"; a choice belongs into the list of defaults: '- override /{key}: {value}'"
            raise ConfigError(f"{path}: {prefix}{key} must be {kinds}, not {value!r}{hint}")
        if dataclasses.is_dataclass(factory):
            _check_shapes(value, path, factory, f"{prefix}{key}.")


class _Files(ConfigSource):
    """A folder of YAML files, which are read with limits (:func:`exp.runs.files.read_yaml`)."""

    @staticmethod
    def scheme() -> str:
        """The prefix of this source in the search path."""
        return "files"

    def available(self) -> bool:
        """Whether the folder is there."""
        return self.is_group("")

    def load_config(self, config_path: str) -> ConfigResult:
        """The content of a file.

        A class without typed keys accepts any key here; its constructor checks the arguments.

        Raises:
            ConfigError: the file is not valid, sets keys of Hydra that have no effect, has another value where a list
                or a dictionary belongs, or is an experiment without ``# @package _global_``.
        """
        path, package = self._path_of(config_path), None

        def load(text: str) -> Any:
            nonlocal package
            match = _PACKAGE.match(text)
            package = match and match.group(1)
            return OmegaConf.load(io.StringIO(text))

        node = read_yaml(path, load)
        if not isinstance(node, DictConfig):
            raise ConfigError(f"{path} is a list", "a file of configuration has lines such as 'key: value'")
        if config_path.startswith("experiment/") and package is None:
            raise ConfigError(
                f"{path} lacks the line '# @package _global_' at its top, so its keys would have no effect"
            )
        content: Any = OmegaConf.to_container(node)
        if package == "_global_":
            _check_shapes(content, path)
            for key in content.get("hydra") or ():
                check_hydra_key(f"hydra.{key}", f"{path}: ")
            if "record" in content:
                raise ConfigError(f"{path}: record is written by exp, and cannot be set", "leave it out")
        for key in _defaults_groups(content.get("defaults")):
            check_hydra_key(key, f"{path}: ")
        for part in (node, *(node.get(key) for key in ("data", "model", "task"))):
            if isinstance(part, DictConfig) and part.get("_target_") and structure_of(part["_target_"]) is None:
                OmegaConf.set_struct(part, False)
        return ConfigResult(self.provider, self.full_path(), node, {"package": package})

    def is_config(self, config_path: str) -> bool:
        """Whether there is such a file."""
        return self._path_of(config_path).is_file()

    def is_group(self, config_path: str) -> bool:
        """Whether there is such a folder."""
        return Path(self.path, config_path).is_dir()

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """The names of files, of folders, or of both, directly in a folder."""
        entries = [entry for entry in Path(self.path, config_path).iterdir() if entry.name != "__pycache__"]
        configs = {entry.stem for entry in entries if entry.suffix == ".yaml" and entry.is_file()}
        groups = {entry.name for entry in entries if entry.is_dir()}
        return sorted({ObjectType.CONFIG: configs, ObjectType.GROUP: groups, None: configs | groups}[results_filter])

    def _path_of(self, config_path: str) -> Path:
        return Path(self.path, config_path if config_path.endswith(".yaml") else f"{config_path}.yaml")


def _defaults_groups(defaults: Any) -> Iterator[str]:
    """The config groups in a defaults list, without the word ``override`` and a leading slash."""
    for entry in defaults if isinstance(defaults, list) else ():
        for group in entry if isinstance(entry, dict) else [str(entry)]:
            yield re.sub(r"^(override |optional )*/?", "", str(group))


class _Dataclasses(ConfigSource):
    """The choices that need no file (:func:`_choices`).

    Hydra's ConfigStore would make the nodes of all choices in each process, although a run needs a third of them.
    """

    @staticmethod
    def scheme() -> str:
        """The prefix of this source in the search path."""
        return "dataclasses"

    def available(self) -> bool:
        """True: this source needs no folder, so nothing can be missing."""
        return True

    def load_config(self, config_path: str) -> ConfigResult:
        """A new node of one of the choices."""
        node = open_dicts(_choices()[config_path])
        return ConfigResult(self.provider, self.full_path(), node, {"package": None})

    def is_config(self, config_path: str) -> bool:
        """Whether the path is a choice."""
        return config_path in _choices()

    def is_group(self, config_path: str) -> bool:
        """Whether there are choices in this group."""
        return any(name.startswith(f"{config_path}/") for name in _choices())

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """The names of choices, of groups, or of both, directly below a path."""
        prefix = f"{config_path}/" if config_path else ""
        names = [name[len(prefix) :] for name in _choices() if name.startswith(prefix)]
        configs = {name for name in names if "/" not in name}
        groups = {name.partition("/")[0] for name in names} - configs
        return sorted({ObjectType.CONFIG: configs, ObjectType.GROUP: groups, None: configs | groups}[results_filter])
