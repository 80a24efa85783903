"""Before and after the launch of ``task=doctor``: a line, a table, ``doctor.json`` and ``result.json``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from exp import console
from exp.doctor.record import FAILED, OK, WARNING
from exp.doctor.table import print_report, print_training
from exp.doctor.training_memory import training_memory
from exp.doctor.verdict import assemble, clear, value_of
from exp.errors import RunError
from exp.result import blank_result
from exp.runfolder import write_json

if TYPE_CHECKING:
    from exp.config.schema import ExpConfig
    from exp.launcher.outcome import Outcome
    from exp.runfolder import RunFolder

__all__ = ["begin", "end"]


def begin(config: ExpConfig, folder: RunFolder, where: str) -> None:
    """Say what is examined; nothing of an earlier examination may be taken for this one's."""
    clear(folder)
    processes = config.nproc * config.launcher.nnodes
    console.make_console().print(
        f"doctor: {processes} process{'es' if processes > 1 else ''} on {config.backend.name}, {config.precision}; "
        f"up to {config.task.timeout_s} s for each check\nrun folder: {where}",
        soft_wrap=True,
    )


def end(config: ExpConfig, folder: RunFolder, outcome: Outcome, where: str) -> int:
    """Judge, write and print; then advise, which may take a while and changes no verdict.

    Args:
        config: the frozen configuration.
        folder: the run folder.
        outcome: how the launch ended.
        where: the run folder, as shown to the user.

    Returns:
        The exit code.
    """
    report = assemble(config, folder, outcome, started=folder.config.stat().st_mtime)
    report["training"] = None
    result = blank_result(config)
    worst = next((finding for finding in report["findings"] if finding["status"] == FAILED), None)
    result.update(
        status="completed" if report["verdict"] in (OK, WARNING) else "failed",
        devices=[_device(rank) for rank in report["ranks"]],
        device_type=next((str(value_of(rank, "device", "device")).split(":")[0] for rank in report["ranks"]), None),
        process_group=report["process_group"],
        fallback=report["fallback"],
        wall_s=report["wall_s"],
        restarts=outcome.restarts,
        batch_size=None,  # there is none
        global_batch_size=None,
    )
    if worst is not None:
        message = f"{worst['check']}: {worst['finding']}; {worst['advice']}"
        result["error"] = {"rank": next(iter(worst["ranks"]), None), "type": RunError.__name__, "message": message}
    unwritten = None
    try:
        write_json(folder.path / "doctor.json", report)
        folder.write_result(result)
    except OSError as error:  # the disk that the doctor complains of; the table must still be seen
        unwritten = error.strerror
    print_report(console.make_console(), report, f"{where}/doctor.json" if unwritten is None else "no file")
    if unwritten is not None:
        console.error(f"cannot write {folder.path / 'doctor.json'}: {unwritten}; make space, or set output_dir")
        return int(report["exit_code"])
    report["training"] = training_memory(report, config, folder)
    if report["training"] is not None:
        print_training(console.make_console(), report["training"])
        write_json(folder.path / "doctor.json", report)
    return int(report["exit_code"])


def _device(rank: dict[str, Any]) -> dict[str, Any]:
    return {key: value_of(rank, "device", key) for key in ("name", "index", "host")}
