"""Runs what has been frozen, with the launcher that its configuration names, and says what came of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from exp import console, early, hub, launcher, summary
from exp.hardware.registry import create_backend
from exp.summary import Finished

if TYPE_CHECKING:
    from exp.frozen import FrozenRun

__all__ = ["execute"]


def execute(run: FrozenRun) -> Finished:
    """Write the run folder, launch, wait, print and record the end.

    Raises:
        ExpError: it cannot be started; what goes wrong later is in the answer.
    """
    config, folder = run.config, run.folder
    chosen = launcher.resolve(config.launcher, config.nproc)
    script = chosen.preflight([run], folder.path / "slurm")
    if script is not None:
        console.make_console().out(script, highlight=False)
        return Finished()
    backend = create_backend(config.backend)
    hub.bring(config)
    if not chosen.leads:
        return Finished(chosen.launch(run).exit_code)
    run.write(chosen.job_token())
    summary.begin(config, folder, backend)
    early.begin()
    if not chosen.submits:
        console.wait_for("starting the worker" if config.nproc == 1 else f"starting {config.nproc} workers")
    try:
        outcome = chosen.launch(run)
    finally:
        console.waited()
    run.check_folder()
    return summary.end(config, folder, outcome)
