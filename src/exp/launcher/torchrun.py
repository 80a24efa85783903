"""launcher=torchrun: workers under torch's elastic agent, in a session of their own, supervised from here."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exp.errors import EXIT_FAILED
from exp.launcher.base import Launcher
from exp.launcher.hang_detector import unfinished
from exp.launcher.outcome import Outcome, collect_failures, exit_code_of, leave_word
from exp.launcher.ports import check_endpoint, check_loopback
from exp.launcher.processes import signal_name
from exp.launcher.rank import this_host
from exp.launcher.supervisor import Supervisor
from exp.lock_holder import LOCK, read_holder
from exp.preemption import PREEMPT_SIGNAL
from exp.runfolder import read_json, to_json
from exp.sockets import folder_for_sockets

if TYPE_CHECKING:
    from exp.runfolder import RunFolder

__all__ = ["TorchrunLauncher"]


class TorchrunLauncher(Launcher):
    """Starts the agent as a process of its own, so that this one never imports torch or holds a device."""

    preemption_signals: tuple[signal.Signals, ...] = (PREEMPT_SIGNAL,)
    """On these the run saves its state and ends; on a second one of the same kind it ends at once."""

    def check(self, nproc: int) -> None:
        """Refuse a meeting point that cannot be used.

        Raises:
            ConfigError: it is malformed, its host is not known, or its port is taken.
            UnavailableError: processes of this machine do not reach each other.
        """
        if nproc > 1 and self.nnodes == 1 and "GLOO_SOCKET_IFNAME" not in os.environ:
            check_loopback()
        if self.rdzv_endpoint is not None:
            check_endpoint(self.rdzv_endpoint)

    def job_token(self) -> str | None:
        """Nodes that are started by hand share their meeting point, and the run folder."""
        return None if self.nnodes == 1 else f"{self.rdzv_endpoint}/{self.rdzv_id}"

    def launch(self, folder: RunFolder, nproc: int, saves: bool = True) -> Outcome:
        """Run the workers; whatever ends the run, no process of it is left behind."""
        for stale in folder.logs.glob("rank*.error.json"):
            stale.unlink()
        name = "agent" if self.nnodes == 1 else f"agent-{this_host()}-{os.getpid()}"
        log, report_file = folder.logs / f"{name}.log", folder.logs / f"{name}.json"
        if report_file.exists():
            report_file.unlink()  # an earlier launch's; an agent that is killed leaves none
        # The agent's own TCP store would serve the workers, too: on one node it listens on every interface; on several
        # it still holds the keys of the ranks before a restart, and the new ones wait for the dead.
        environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        if self.nnodes == 1:
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")  # gloo would listen on the host's public address
        with tempfile.TemporaryDirectory(prefix="exp-", dir=folder_for_sockets()) as scratch:
            spec = {
                "run_dir": str(folder.path),
                "nproc": nproc,
                "nnodes": self.nnodes,
                "endpoint": self.rdzv_endpoint or f"{scratch}/rendezvous",
                "rdzv_id": self._meeting(folder),
                "max_restarts": self.max_restarts,
                "timeout_s": self.timeout_s,
                "scratch": scratch,
                "report": str(report_file),
                "parent": os.getpid(),
            }
            supervisor = Supervisor(self, scratch, lambda: folder, saves, self.preemption_signals)
            _, code = supervisor.run(["exp.launcher.agent", to_json(spec)], environment, log, nproc, self.nnodes)
            report, outcome = read_json(report_file), supervisor.outcome()
            if outcome is None and report is not None and report["succeeded"]:
                outcome = Outcome()
            elif outcome is None:
                outcome = self._failed(folder, scratch, nproc, report, code, supervisor.killed)
                outcome.detail = f"{outcome.detail}\n  log: {log}"
        outcome.restarts = 0 if report is None else report["restarts"]
        outcome.unkillable = supervisor.unkillable
        return outcome

    def _meeting(self, folder: RunFolder) -> str:
        """What the nodes call their meeting by: whoever can read the lock of their run folder knows it."""
        holder = None if self.nnodes == 1 else read_holder(folder.path / LOCK)
        return holder.secret if holder is not None and holder.secret else self.rdzv_id

    def _failed(self, folder: RunFolder, scratch: str, nproc: int, report: Any, code: int, killed: bool) -> Outcome:
        """The ranks that failed, or what the agent complained of.

        Args:
            folder: the run folder.
            scratch: the private folder of the job on this node.
            nproc: workers of this node.
            report: the agent's; None: it has left none.
            code: the agent's exit code.
            killed: whether this process killed it.
        """
        ended = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with code {code}"
        lost = f"torch's agent on {this_host()} {ended}"
        if report is None and not killed and self.nnodes > 1:  # the other nodes have to know
            for local_rank, beat in unfinished(scratch, alive=False):
                leave_word(folder, scratch, beat, local_rank, None, end=("AgentLost", lost))
        unplaced = [read_json(path) for path in Path(scratch).glob("rank*.error.json")]
        ranks = 0 if self.nnodes == 1 else nproc * self.nnodes
        failures = collect_failures(folder, unplaced, ranks, nproc)
        if report is None and all(failure.of_peer for failure in failures):
            failures = []  # they have lost those of this node
        exit_code = exit_code_of(failures[0]) if failures else EXIT_FAILED
        return Outcome(exit_code, failures=failures, detail=lost if report is None else self._explain(report["error"]))

    def _explain(self, error: str | None) -> str:
        """What the agent complained of, in the user's words where it is about the other nodes."""
        if error is None or self.nnodes == 1 or not error.startswith(("Rendezvous", "Dist")):
            return error or "no rank left an error"
        return (
            f"the {self.nnodes} nodes did not meet at launcher.rdzv_endpoint={self.rdzv_endpoint} "
            f"within launcher.timeout_s={self.timeout_s}; start the same command on every node, and check that each "
            f"reaches this port\n  {error}"
        )
