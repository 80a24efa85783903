"""launcher=torchrun: workers under torch's elastic agent, in a session of their own, supervised from here."""

from __future__ import annotations

import os
import signal
import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from exp.errors import ConfigError
from exp.launcher.base import Launcher
from exp.launcher.outcome import Failures, Outcome, tail_of
from exp.launcher.ports import check_endpoint, check_loopback
from exp.launcher.rank import this_host
from exp.launcher.supervisor import Supervisor
from exp.runs import status
from exp.runs.files import to_json
from exp.runs.lock import LOCK, read_holder
from exp.runs.status import PREEMPT_SIGNAL, signal_name
from exp.task import task_class

if TYPE_CHECKING:
    from exp.frozen import FrozenRun

__all__ = ["TorchrunLauncher"]


class TorchrunLauncher(Launcher):
    """Starts the agent as a process of its own, so that this one never imports torch or holds a device."""

    preemption_signals: tuple[signal.Signals, ...] = (PREEMPT_SIGNAL,)
    """On these the run saves its state and ends; on a second one of the same kind it ends at once."""
    forgets: bool = True
    """Whether a launch removes the error files of an earlier one; not where nodes have met before."""
    meeting: str = "exp"
    """Under which name the agents of several nodes meet, where the lock of their folder gives none."""

    def check(self, nproc: int) -> None:
        """Refuse a meeting point that cannot be used.

        Raises:
            ConfigError: it is missing or malformed, its host is not known, or its port is taken.
            UnavailableError: processes of this machine do not reach each other.
        """
        if self.config.nnodes > 1 and not self.config.rdzv_endpoint:
            raise ConfigError(
                f"launcher.nnodes={self.config.nnodes} needs a meeting point; set launcher.rdzv_endpoint=<host of one "
                "node>:<port>"
            )
        if nproc > 1 and self.config.nnodes == 1 and "GLOO_SOCKET_IFNAME" not in os.environ:
            check_loopback()
        if self.config.rdzv_endpoint is not None:
            check_endpoint(self.config.rdzv_endpoint)

    def job_token(self) -> str | None:
        """Nodes that are started by hand share their meeting point, and the run folder."""
        return None if self.config.nnodes == 1 else str(self.config.rdzv_endpoint)

    def launch(self, run: FrozenRun) -> Outcome:
        """Run the workers; whatever ends the run, no process of it is left behind."""
        folder, nproc, saves = run.folder, run.config.nproc, task_class(run.config).saves_state
        if self.forgets:
            Failures(folder).forget()
        log = folder.logs / ("agent.log" if self.config.nnodes == 1 else f"agent-{this_host()}-{os.getpid()}.log")
        # The agent's own TCP store would serve the workers, too: on one node it listens on every interface; on several
        # it still holds the keys of the ranks before a restart, and the new ones wait for the dead.
        environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        holder = None
        if self.config.nnodes == 1:
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")  # gloo would listen on the host's public address
        else:  # the nodes meet under a name that only readers of their folder's lock know
            holder = read_holder(folder.path / LOCK)
        with tempfile.TemporaryDirectory(prefix="exp-") as scratch:
            spec = {
                **vars(self.config),
                "run_dir": str(folder.path),
                "nproc": nproc,
                "rdzv_endpoint": self.config.rdzv_endpoint or f"{scratch}/rendezvous",
                "rdzv_id": (holder and holder.secret) or self.meeting,
                "parent": os.getpid(),
            }
            failures = Failures(folder, scratch)
            supervisor = Supervisor(self, scratch, failures, saves, self.preemption_signals)
            _, code = supervisor.run(["exp.launcher.agent", to_json(spec)], environment, log, nproc, self.config.nnodes)
            outcome = supervisor.outcome() or (Outcome() if code == 0 else None)
            if outcome is None:
                outcome = self._failed(failures, nproc, supervisor.killed, code, log)
            attempts = Counter(path.name.split("-")[1] for path in Path(scratch).glob("attempt-*"))
        outcome.restarts, outcome.unkillable = max(attempts.values(), default=1) - 1, supervisor.unkillable
        return outcome

    def _failed(self, known: Failures, nproc: int, killed: bool, code: int, log: Path) -> Outcome:
        """Why the agent has ended with ``code``: a rank of this or another node has failed, or it has itself."""
        nnodes = self.config.nnodes
        lost = f"torch's agent on {this_host()} was killed by {signal_name(-code)}"
        if code < 0 and not killed and nnodes > 1:  # the other nodes have to know
            known.write_lost(lost)
        failures = known.collect(0 if nnodes == 1 else nproc * nnodes, nproc)
        if code < 0 and all(failure.of_peer for failure in failures):
            return Outcome.of([], f"{lost}\n  log: {log}")  # what there is has lost those of this node
        if nnodes > 1 and not any(beat.pid for beat in status.read(str(known.scratch))):
            lost = (
                f"the {nnodes} nodes did not meet at launcher.rdzv_endpoint={self.config.rdzv_endpoint} within "
                f"launcher.timeout_s={self.config.timeout_s}; start the same command on every node, and check that "
                "each reaches this port"
            )
        elif code > 0:
            lost = "torch's agent failed, and no rank left an error"
        return Outcome.of(failures, "\n".join([lost, *tail_of(log)]))
