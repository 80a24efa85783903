"""Runs what has been frozen, with the launcher that its configuration names, and says what came of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from exp import console, early, hub, launcher, summary
from exp.backends_registry import create_backend
from exp.contract import TASK_PAGE, shown
from exp.errors import EXIT_OK, RunError
from exp.launcher.base import launcher_class
from exp.launcher.outcome import Outcome
from exp.lock_holder import holder_of
from exp.summary import Finished

if TYPE_CHECKING:
    from exp.config.schema import ExpConfig
    from exp.frozen import FrozenRun

__all__ = ["execute"]


def execute(run: FrozenRun) -> Finished:
    """Write the run folder, launch, wait, print and record the end.

    Raises:
        ExpError: it cannot be started; what goes wrong later is in the answer.
    """
    config, folder = run.config, run.folder
    chosen = launcher.resolve(config.launcher, config.nproc)
    holder = holder_of(folder.path)
    if holder is not None and holder.job and launcher_class(config).submits:
        from exp.launcher.follow import attach_to, the_same

        if the_same(run, folder):
            return attach_to(folder)
    script = chosen.preflight([run], folder.path / "slurm")
    if script is not None:
        console.make_console().out(script, highlight=False)
        return Finished()
    backend = create_backend(config.backend)
    backend.prepare()
    if run.reference is not None:
        create_backend(run.reference.backend).prepare()
    hub.bring(config)
    if not chosen.leads:
        return Finished(chosen.take_part(run))
    run.write(chosen.job_token())
    summary.begin(config, folder, backend)
    early.begin()
    if run.reference is not None:
        return _parity(run, run.reference, chosen)
    return _launched(run, chosen)


def _launched(run: FrozenRun, chosen: launcher.Launcher) -> Finished:
    if not chosen.submits:
        processes = run.config.nproc
        console.wait_for("starting the worker" if processes == 1 else f"starting {processes} workers")
    try:
        outcome = chosen.launch_run(run)
    finally:
        console.waited()
    if not isinstance(outcome, Outcome):
        raise RunError(
            f"launcher: {shown(chosen)}.launch must give an exp.launcher.outcome.Outcome, not a "
            f"{type(outcome).__name__}; see {TASK_PAGE}"
        )
    run.check_folder()
    return summary.end(run.config, run.folder, outcome)


def _parity(run: FrozenRun, reference: ExpConfig, chosen: launcher.Launcher) -> Finished:
    """Both runs of ``task=parity``, and their comparison."""
    from exp.parity import runs
    from exp.parity.summary import finish

    config, folder = run.config, run.folder
    changed = runs.prepare(config, reference)
    if changed:
        console.make_console().print(f"dropout is off in both runs: {', '.join(changed)}", soft_wrap=True)
    outcome, tested, other = runs.launch_both(chosen, folder, config, reference)
    run.check_folder()
    if outcome.exit_code == EXIT_OK:
        return Finished(*finish(config, folder, tested, other, console.shown(folder.path)))
    return summary.end(config, folder, outcome)
