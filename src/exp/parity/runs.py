"""The two runs of ``task=parity``, one after the other, through the run's own launcher. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omegaconf import DictConfig, OmegaConf

from exp import console
from exp.errors import EXIT_OK
from exp.runfolder import RunFolder, write_atomically

if TYPE_CHECKING:
    from exp.config.schema import ExpConfig
    from exp.launcher.base import Launcher
    from exp.launcher.outcome import Outcome

__all__ = ["launch_both", "prepare"]


def prepare(config: ExpConfig, reference: ExpConfig) -> list[str]:
    """Make two configurations train a few comparable steps: no dropout, every loss recorded.

    Args:
        config: of the backend under test; changed in place.
        reference: of the reference; changed in place, and named in ``config.reference``.

    Returns:
        The keys of the model that were set to 0, with what they were.
    """
    changed: list[str] = []
    for each in (config, reference):
        changed = _turn_off(each.model, "model")
        each.max_steps, each.log_every = each.steps, 1
        each.max_epochs = max(each.max_epochs or 0, each.steps)
    reference.compile = False  # what compiling changes is a part of what is compared
    return changed


def _turn_off(node: DictConfig, prefix: str) -> list[str]:
    """Set the probabilities of dropout (``dropout``, ``attn_drop``, ``drop_path_rate``, ...) in ``node`` to 0."""
    changed = []
    for key, value in node.items():
        name = f"{prefix}.{key!s}"
        if isinstance(value, DictConfig):
            changed += _turn_off(value, name)
        elif isinstance(value, float) and value > 0 and "drop" in str(key):
            node[key] = 0.0
            changed.append(f"{name} was {value}")
    return changed


def launch_both(
    launcher: Launcher, folder: RunFolder, config: ExpConfig, reference: ExpConfig
) -> tuple[Outcome, RunFolder, RunFolder]:
    """Run ``config`` in ``tested/`` and ``reference`` in ``reference/``; the second only after the first succeeded."""
    terminal = console.make_console()
    folders = RunFolder(folder.path / "tested"), RunFolder(folder.path / "reference")
    for part, settings in zip(folders, (config, reference)):
        part.create()
        settings.output_dir = str(part.path)
        write_atomically(part.config, OmegaConf.to_yaml(settings, resolve=True).encode())
        terminal.print(f"{part.path.name}: {settings.backend.name}")
        outcome = launcher.launch(part, settings.nproc, saves=False)
        if outcome.exit_code != EXIT_OK:
            break
    return outcome, folders[0], folders[1]
