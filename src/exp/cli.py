"""The command line: compose and validate once, write the run folder, launch, report.

Nothing here imports torch: help, completion, ``--cfg`` and every configuration error answer at once, and the parent of
a distributed run never holds a device.
"""

from __future__ import annotations

import contextlib
import os
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Iterator

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from exp import console, launcher, report
from exp.backends_registry import choose, create_backend
from exp.config import choices, explain, schema
from exp.config.validate import refuse_device_arguments, validate
from exp.errors import EXIT_CONFIG, EXIT_OK, ConfigError, ExpError
from exp.launcher.shell_env import take_stale_variables
from exp.runfolder import RunFolder, write_atomically

if TYPE_CHECKING:
    from exp.launcher.base import Outcome

__all__ = ["main"]

_exit_codes: list[int] = []


def main() -> int:
    """Run the command line in ``sys.argv``; returns the exit code (docs/exit-codes.md)."""
    os.umask(os.umask(0) | 0o022)  # nothing that a run writes may be changed by others
    schema.register()
    choices.register_resolvers()
    _exit_codes.clear()
    full_error = bool(os.environ.get("HYDRA_FULL_ERROR"))
    try:
        with _errors_reach_us():
            _hydra_main()
    except (HydraException, OmegaConfBaseException) as error:
        if full_error:
            traceback.print_exc()
        console.error(explain.explain(error, choices.default_keys()))
        return EXIT_CONFIG
    except KeyboardInterrupt:
        console.error("interrupted")
        return max(_exit_codes, default=130)
    return max(_exit_codes, default=EXIT_OK)


@contextlib.contextmanager
def _errors_reach_us() -> Iterator[None]:
    """Have Hydra raise its errors instead of printing them and exiting with 1: the switch that it offers for it."""
    before = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = before


@hydra.main(version_base="1.3", config_path="pkg://exp.conf", config_name="config")
def _hydra_main(config: DictConfig) -> float | None:
    """One job of Hydra's: the run, or one of a sweep's."""
    state = HydraConfig.get()
    try:
        return _run(config, list(state.overrides.task), Path(state.runtime.output_dir))
    except (ExpError, OmegaConfBaseException) as error:
        # Told here, not raised: Hydra would print a line of its own, and end the sweep that this job is part of.
        _remove_if_empty(Path(state.runtime.output_dir))
        job = f"job {' '.join(state.overrides.task)}: " if state.mode == RunMode.MULTIRUN else ""
        if isinstance(error, ExpError):
            console.error(job + str(error))
            _exit_codes.append(error.exit_code)
        else:
            console.error(job + explain.explain(error, []))
            _exit_codes.append(EXIT_CONFIG)
        return float("nan")


def _run(config: DictConfig, overrides: list[str], output_dir: Path) -> float | None:
    config = _choose_backend(config, overrides)
    with open_dict(config):
        config.output_dir = str(output_dir.absolute())
    refuse_device_arguments(config)
    typed = OmegaConf.merge(OmegaConf.structured(schema.ExpConfig), config)  # checks what +KEY=VALUE added, too
    assert isinstance(typed, DictConfig)
    config = typed
    backend = create_backend(config.backend)
    validate(config, overrides, backend)
    reference = _reference(config, overrides) if config.task.name == "parity" else None
    chosen = launcher.resolve(config.launcher, config.nproc)
    stale = take_stale_variables(os.environ)
    if stale:
        console.warn(f"ignoring {', '.join(stale)} of the shell: exp starts its own workers")
    backend.prepare()
    folder = RunFolder(output_dir)
    folder.create()
    write_atomically(folder.config, OmegaConf.to_yaml(config, resolve=True).encode())
    write_atomically(folder.overrides, OmegaConf.to_yaml(OmegaConf.create(overrides)).encode())
    if config.resume is None and folder.result.is_file():
        folder.result.unlink()
    report.begin(config, folder, backend)
    if reference is not None:
        return _parity(config, reference, folder, chosen)
    outcome = chosen.launch(folder, config.nproc)
    metric = report.end(config, folder, outcome, _exit_codes)
    _stop_if_interrupted(outcome)
    return metric


def _stop_if_interrupted(outcome: Outcome) -> None:
    """Stop the sweep, not only this job of it."""
    if outcome.interrupted_by is not None and HydraConfig.get().mode == RunMode.MULTIRUN:
        raise KeyboardInterrupt


def _reference(config: DictConfig, overrides: list[str]) -> DictConfig:
    """The same configuration for the reference of ``task=parity``, ready to run.

    What the user has set below ``backend`` is meant for the backend under test; the reference has what its own file
    says, unless it is the same one.
    """
    kept = list(overrides)
    if f"backend={config.reference}" not in overrides:
        kept = [override for override in overrides if not override.lstrip("+~").startswith("backend")]
    try:
        composed = _compose([*kept, f"backend={config.reference}"])
    except MissingConfigException as error:
        # Raised as it is, it would name a key that the user has not given, after a line of Hydra's own.
        raise ConfigError(explain.explain(error, []).replace("backend=", "reference=", 1)) from error
    composed = _choose_backend(composed, kept)
    with open_dict(composed):
        composed.output_dir = config.output_dir
    reference = OmegaConf.merge(OmegaConf.structured(schema.ExpConfig), composed)
    assert isinstance(reference, DictConfig)
    backend = create_backend(reference.backend)
    validate(reference, overrides, backend)
    backend.prepare()
    config.reference = reference.backend.name  # where it was auto
    return reference


def _parity(config: DictConfig, reference: DictConfig, folder: RunFolder, chosen: launcher.Launcher) -> float | None:
    """Both runs of ``task=parity``, and their comparison."""
    from exp.parity import runs
    from exp.parity.report import finish

    changed = runs.prepare(config, reference)
    if changed:
        console.make_console().print(f"dropout is off in both runs: {', '.join(changed)}", soft_wrap=True)
    outcome, tested, other = runs.launch_both(chosen, folder, config, reference)
    if outcome.exit_code == EXIT_OK:
        code, difference = finish(config, folder, tested, other, report.shown(folder))
        _exit_codes.append(code)
        return difference
    metric = report.end(config, folder, outcome, _exit_codes)
    _stop_if_interrupted(outcome)
    return metric


def _compose(overrides: list[str]) -> DictConfig:
    """The configuration for these overrides, without Hydra's own part."""
    loader = GlobalHydra.instance().config_loader()
    # A backend's file may lie in a folder that only this adds.
    searched = [override for override in HydraConfig.get().overrides.hydra if override.startswith("hydra.searchpath=")]
    composed = loader.load_configuration("config", [*overrides, *searched], run_mode=RunMode.RUN)
    with open_dict(composed):
        del composed["hydra"]
    return composed


def _choose_backend(config: DictConfig, overrides: list[str]) -> DictConfig:
    """Replace ``backend=auto`` by the first that is available, with that backend's own configuration."""
    if config.backend["_target_"] != "auto":
        return config
    if config.backend.simulate:
        raise ConfigError("backend.simulate=true with backend=auto: say which backend's devices are to be simulated")
    name = choose(list(config.backend.options.candidates))
    kept = [override for override in overrides if not override.startswith("backend=")]
    try:
        return _compose([*kept, f"backend={name}"])
    except MissingConfigException:
        # Installed by another package, and no YAML file of its own in the search path: the class's own defaults.
        config.backend._target_ = config.backend.name = name
        config.backend.options = {}
        return config


def _remove_if_empty(folder: Path) -> None:
    """Hydra makes the output folder before a configuration is refused: leave nothing behind, nor empty parents."""
    for path in (folder, *folder.parents):
        if path == Path.cwd() or not path.is_dir() or any(path.iterdir()):
            return
        path.rmdir()
