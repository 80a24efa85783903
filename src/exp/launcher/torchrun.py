"""launcher=torchrun: starts torch's elastic agent in a session of its own; the agent starts the workers."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from exp.errors import ConfigError
from exp.hardware.ports import check_endpoint, check_loopback
from exp.launcher.base import Launcher
from exp.launcher.outcome import Outcome, tail_of
from exp.launcher.supervisor import Supervisor
from exp.runs import heartbeat
from exp.runs.failures import NODE_VARIABLE, Failures
from exp.runs.files import write_json
from exp.runs.job import PREEMPT_SIGNAL, SCRATCH_VARIABLE, signal_name
from exp.runs.lock import LOCK, read_holder
from exp.worker.processes import SPEC, start_module

if TYPE_CHECKING:
    from exp.launcher.base import FrozenRun

__all__ = ["TorchrunLauncher"]


class TorchrunLauncher(Launcher):
    """Starts the agent as a process of its own, so that this process never imports torch or holds a device."""

    preemption_signals: tuple[signal.Signals, ...] = (PREEMPT_SIGNAL,)
    """On these signals the run saves its state and ends; on a second signal of the same number it ends at once."""

    def check(self, nproc: int) -> None:
        """Check the rendezvous endpoint.

        Raises:
            ConfigError: the endpoint is missing or malformed, its host is unknown, or its port is taken.
            UnavailableError: the loopback interface is down.
        """
        if self.config.nnodes > 1 and not self.config.rdzv_endpoint:
            raise ConfigError(
                f"launcher.nnodes={self.config.nnodes} needs a rendezvous; set launcher.rdzv_endpoint=<host of one "
                "node>:<port>"
            )
        if nproc > 1 and self.config.nnodes == 1 and "GLOO_SOCKET_IFNAME" not in os.environ:
            check_loopback()
        if self.config.rdzv_endpoint is not None:
            check_endpoint(self.config.rdzv_endpoint)

    def job_id(self) -> str | None:
        """The rendezvous: nodes that are started by hand share it, and the run folder."""
        return None if self.config.nnodes == 1 else str(self.config.rdzv_endpoint)

    def launch(self, run: FrozenRun) -> Outcome:
        """Run the workers; however the run ends, none of its processes is left behind."""
        folder, nproc, nnodes = run.folder, run.config.nproc, self.config.nnodes
        log = folder.logs / ("agent.log" if nnodes == 1 else f"agent-{socket.gethostname()}-{os.getpid()}.log")
        # Otherwise the workers would share the agent's TCP store. On one node that store listens on every interface; on
        # several it keeps the keys of the ranks before a restart, and the new ranks would wait for the dead ones.
        environment, holder = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}, None
        if nnodes == 1:
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")  # otherwise gloo listens on the host's public address
        else:  # the name of the rendezvous is a secret, which only readers of the run folder's lock know
            holder = read_holder(folder.path / LOCK)
            if self.config.mixed:
                environment[NODE_VARIABLE] = f"{run.backend.name} on {socket.gethostname()}"
        with tempfile.TemporaryDirectory(prefix="exp-") as scratch:
            spec = {
                **vars(self.config),
                "run_dir": str(folder.path),
                "nproc": nproc,
                "rdzv_endpoint": self.config.rdzv_endpoint or f"{scratch}/rendezvous",
                "rdzv_id": "exp" if holder is None else holder.secret,
                "parent": os.getpid(),
            }
            failures = Failures(folder, scratch)
            environment[SCRATCH_VARIABLE] = scratch
            job = Supervisor(self, run, scratch, self.preemption_signals, failures)
            for name, content in run.contents().items() if run.has_peers else ():
                Path(scratch, name).write_bytes(content)
            # A file in the private folder, because everybody on this machine can read the arguments of a process.
            write_json(Path(scratch, SPEC), spec)
            agent = "exp.launcher.agent", str(folder.path)
            code = job.watch(lambda log: start_module(*agent, environment=environment, stderr=log), log, nproc, nnodes)
            return job.outcome(lambda: self._failed(failures, nproc, job.killed, code, log) if code else Outcome())

    def _failed(self, failures: Failures, nproc: int, killed: bool, code: int, log: Path) -> Outcome:
        """Why the agent ended with ``code``: a rank of this or another node failed, or the agent itself did."""
        nnodes, of_agent = self.config.nnodes, code < 0 and not killed
        why = f"torch's agent on {socket.gethostname()} was killed by {signal_name(-code)}"
        if of_agent:  # the other nodes read the cause from the run folder
            failures.record_lost(why)
        world_size = 0 if nnodes == 1 else nproc * nnodes
        if self.config.mixed or self.config.min_nnodes:  # only the ranks know how many they are
            attempts = sorted(Path(str(failures.scratch)).glob("attempt-*"), key=lambda file: file.stat().st_mtime_ns)
            world_size = next((int(file.read_text()) for file in reversed(attempts) if file.stat().st_size), 0)
        collected = failures.collect(world_size, 0 if self.config.mixed else nproc)
        if self.config.min_nnodes is not None and code > 0:  # torch's error, or that of exp.launcher.rendezvous
            why = log.read_text(encoding="utf-8").rstrip().rpartition("\n")[2].rpartition("Error: ")[2]
            return Outcome.of(collected, f"{why}; to go on from the last checkpoint, start all nodes with resume=auto")
        if nnodes > 1 and not any(beat.pid for beat in heartbeat.read(str(failures.scratch))):
            why = (
                f"the {nnodes} nodes did not meet at launcher.rdzv_endpoint={self.config.rdzv_endpoint} within "
                f"launcher.timeout_s={self.config.timeout_s}; start the same command on every node, and check that "
                "each reaches this port"
            )
        elif code > 0:
            why = "torch's agent failed, and no rank left an error"
        return Outcome.of(collected, "\n".join([why, *tail_of(log)]))
