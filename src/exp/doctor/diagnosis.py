"""task=doctor: examine this rank, its card, and the job that it is part of. The parent judges what the ranks wrote."""

from __future__ import annotations

from typing import TYPE_CHECKING

from exp.doctor.examination import Examination, Rendezvous
from exp.doctor.local_checks import LocalChecks
from exp.doctor.operator_check import check_operators
from exp.doctor.record import Record
from exp.errors import RunError

if TYPE_CHECKING:
    from exp.backend import Backend
    from exp.config.schema import ExpConfig
    from exp.launcher.rank import RankInfo
    from exp.runfolder import RunFolder

__all__ = ["diagnose"]


def diagnose(config: ExpConfig, folder: RunFolder, info: RankInfo, backend: Backend) -> None:
    """Make all checks of one rank, whatever becomes of each, in the steps that a session takes when it opens.

    Raises:
        RunError: a rank is missing, or the record could not be written; the launcher then ends those that hang.
    """
    record = Record(folder, info)
    timeout_s = config.task.timeout_s
    examination, meeting = Examination(record, timeout_s), Rendezvous(folder, info, timeout_s)
    alone = LocalChecks(config, folder, info, backend)
    examination.check("interpreter", alone.interpreter)
    examination.check("packages", alone.packages)
    examination.check("device", alone.select_device, needs=("packages",))
    examination.check("variables", alone.variables, needs=("device",))
    if record.passed("packages"):
        _check_together(examination, meeting, alone, record)
    examination.check("data", alone.data)
    examination.check("output", alone.output)
    examination.check("limits", alone.limits)
    record.finish(meeting.absent)
    if meeting.absent:
        meeting.exchange("end", {})  # the others are to finish their records, too, before the launcher ends them
        raise RunError(f"not all ranks took part: {meeting.describe_absent()}")
    if record.unwritable is not None:
        raise RunError(f"cannot write {record.path}: {record.unwritable.strerror}; make space, or set output_dir")


def _check_together(examination: Examination, meeting: Rendezvous, alone: LocalChecks, record: Record) -> None:
    from exp.doctor.joint_checks import JointChecks

    together = JointChecks(alone, meeting, record, examination.timeout_s)
    examination.check("ranks", together.ranks)
    examination.check("cards", together.cards, needs=("device",))
    examination.check("memory", alone.memory, needs=("device",))
    for name, body in (("group", together.group), ("all_reduce", together.all_reduce), ("ddp", together.ddp)):
        examination.check(name, body, needs=("device", "ranks"))
        meeting.pass_by(name, together.told())
    examination.check("autocast", alone.autocast, needs=("device",))
    examination.check(
        "operators",
        lambda: check_operators(alone.backend, alone.device, alone.config.precision),
        needs=("autocast",),
    )
    examination.check("burst", lambda: alone.burst(together.ready_for_burst), needs=("device",))
    meeting.pass_by("burst", together.told())
    examination.check("utilisation", alone.utilisation, needs=("burst",))
    examination.check("teardown", together.teardown)
    meeting.pass_by("teardown", together.told())
