"""launcher=torchrun: workers under torch's elastic agent, in a session of their own, supervised from here."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Sequence

from exp import heartbeat
from exp.errors import EXIT_FAILED, EXIT_PREEMPTED
from exp.launcher.base import Launcher
from exp.launcher.failures import LOST, collect_failures, exit_code_of, leave_word
from exp.launcher.outcome import Outcome
from exp.launcher.ports import check_endpoint, check_loopback
from exp.launcher.processes import JOB_VARIABLE, handle_signals, is_alive, kill_job, signal_name
from exp.launcher.pulse import Pulse, unfinished
from exp.launcher.rank import SCRATCH_VARIABLE, this_host
from exp.launcher.start import start_module
from exp.lock_holder import LOCK, read_holder
from exp.preemption import PREEMPT_SIGNAL, PreemptionFlag, held_back, preempted_at
from exp.runfolder import read_json, to_json
from exp.sockets import folder_for_sockets

if TYPE_CHECKING:
    from exp.runfolder import RunFolder

__all__ = ["TorchrunLauncher"]

_TERM_PATIENCE_S = 4.0
_ERROR_PATIENCE_S = 6.0  # torch's agent itself would wait half a minute for ranks that ignore SIGTERM


class TorchrunLauncher(Launcher):
    """Starts the agent as a process of its own, so that this one never imports torch or holds a device."""

    preemption_signals: tuple[signal.Signals, ...] = (PREEMPT_SIGNAL,)
    """On these the run saves its state and ends; on a second one of the same kind it ends at once. No process of the
    job but this one ever sees them: who sends them may send them to all."""

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
        report = folder.logs / f"{name}.json"
        if report.exists():
            report.unlink()  # an earlier launch's; an agent that is killed leaves none
        job = secrets.token_hex(8)
        with tempfile.TemporaryDirectory(prefix="exp-", dir=folder_for_sockets()) as scratch:
            order = self._order(folder, nproc, scratch, report)
            heartbeat.make_file(scratch, nproc)
            pulse = Pulse(folder, scratch, self.nnodes, self.timeout_s, self.step_timeout_s)
            flag = PreemptionFlag(scratch) if saves else None
            supervisor = _Supervisor(job, scratch, folder, self.max_restarts > 0, flag, self.preemption_signals, pulse)
            try:
                with handle_signals(supervisor.on_signal):
                    with held_back(self.preemption_signals), (folder.logs / f"{name}.log").open("ab") as log:
                        environment = self._environment(job, scratch)
                        process = start_module(
                            "exp.launcher.agent", to_json(order), environment=environment, stderr=log
                        )
                    received = supervisor.wait(process)
            finally:
                pulse.close()
                unkillable = kill_job(job)
            preempted = preempted_at(scratch)
            unplaced = [read_json(path) for path in Path(scratch).glob("rank*.error.json")]
        outcome = Outcome(unkillable=unkillable)
        if received == PREEMPT_SIGNAL and flag is None:
            preempted = {"step": None}
        if preempted is not None:
            signals = [signal_name(number) for number in supervisor.told]
            outcome.preempted, outcome.exit_code = {**preempted, "signals": signals}, EXIT_PREEMPTED
        else:
            self._fill(outcome, folder, report, process.returncode, received, unplaced, nproc)
        return outcome

    def _order(self, folder: RunFolder, nproc: int, scratch: str, report: Path) -> dict[str, Any]:
        return {
            "run_dir": str(folder.path),
            "worker": self.worker,
            "nproc": nproc,
            "nnodes": self.nnodes,
            "endpoint": self.rdzv_endpoint or f"{scratch}/rendezvous",
            "rdzv_id": self._meeting(folder),
            "max_restarts": self.max_restarts,
            "timeout_s": self.timeout_s,
            "scratch": scratch,
            "report": str(report),
            "parent": os.getpid(),
        }

    def _meeting(self, folder: RunFolder) -> str:
        """What the nodes call their meeting by: whoever can read the lock of their run folder knows it."""
        holder = None if self.nnodes == 1 else read_holder(folder.path / LOCK)
        return holder.secret if holder is not None and holder.secret else self.rdzv_id

    def _environment(self, job: str, scratch: str) -> dict[str, str]:
        environment = {**os.environ, JOB_VARIABLE: job, SCRATCH_VARIABLE: scratch}
        # The agent's own TCP store would serve the workers, too: on one node it listens on every interface; on several
        # it still holds the keys of the ranks before a restart, and the new ones wait for the dead.
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        if self.nnodes == 1:
            # Gloo would listen on the host's public address.
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        return environment

    def _fill(
        self,
        outcome: Outcome,
        folder: RunFolder,
        path: Path,
        returncode: int,
        received: int | None,
        unplaced: list[dict[str, Any]],
        nproc: int,
    ) -> None:
        report = read_json(path)
        killed = report is None
        if report is None:
            ended = f"was killed by {signal_name(-returncode)}" if returncode < 0 else f"ended with code {returncode}"
            said = f"torch's agent on {this_host()} {ended}"
            report = {"succeeded": False, "restarts": 0, "error": said}
        outcome.restarts = report["restarts"]
        if received is not None:
            outcome.interrupted_by = signal_name(received)
            outcome.exit_code = 128 + received
        elif not report["succeeded"]:
            ranks = 0 if self.nnodes == 1 else nproc * self.nnodes
            outcome.failures = collect_failures(folder, unplaced, ranks, nproc)
            if killed and all(failure.of_peer or failure.type == LOST for failure in outcome.failures):
                outcome.failures = []  # ranks of other nodes have lost those of this one
            outcome.exit_code = exit_code_of(outcome.failures[0]) if outcome.failures else EXIT_FAILED
            outcome.detail = f"{self._explain(report['error'])}\n  log: {path.with_suffix('.log')}"

    def _explain(self, error: str | None) -> str:
        """What the agent complained of, in the user's words where it is about the other nodes."""
        if error is None or self.nnodes == 1 or not error.startswith(("Rendezvous", "Dist")):
            return error or "no rank left an error"
        return (
            f"the {self.nnodes} nodes did not meet at launcher.rdzv_endpoint={self.rdzv_endpoint} "
            f"within launcher.timeout_s={self.timeout_s}; start the same command on every node, and check that each "
            f"reaches this port\n  {error}"
        )


class _Supervisor:
    """Waits for the agent, and hands signals on to it.

    Args:
        job: what marks all processes of the job.
        scratch: its private folder.
        folder: the run folder.
        restarts: whether torch's agent starts workers again after a failure; otherwise the job has to end soon.
        preemption_flag: for the workers, which then save their state; None: they have none.
        preemption_signals: those on which it is given.
        pulse: knows the rank that hangs.
    """

    def __init__(
        self,
        job: str,
        scratch: str,
        folder: RunFolder,
        restarts: bool,
        preemption_flag: PreemptionFlag | None,
        preemption_signals: Sequence[int],
        pulse: Pulse,
    ) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.job = job
        self.scratch = scratch
        self.folder = folder
        self.restarts = restarts
        self.preemption_flag = preemption_flag
        self.preemption_signals = preemption_signals
        self.pulse = pulse
        self.told: list[int] = []
        self.received: int | None = None
        self._deadline: float | None = None
        self._gone_since: float | None = None

    def wait(self, process: subprocess.Popen[bytes]) -> int | None:
        """Wait until the agent has ended; returns the signal that this process was sent, if any."""
        self.process = process
        while True:
            try:
                process.wait(timeout=0.2)
                return self.received
            except subprocess.TimeoutExpired:
                self._end_what_hangs()
                self._end_what_is_left()
                failed = not self.restarts and any(self.folder.logs.glob("rank*.error.json"))
                if failed and self._deadline is None:
                    self._deadline = time.monotonic() + _ERROR_PATIENCE_S
                if self._deadline is not None and time.monotonic() > self._deadline:
                    kill_job(self.job)

    def _end_what_is_left(self) -> None:
        """End the job where a rank has left without a word that torch's agent would understand, that is with code 0."""
        gone = unfinished(self.scratch, alive=False)
        if not gone or (self.restarts and not unfinished(self.scratch)):
            self._gone_since = None
            return
        self._gone_since = self._gone_since or time.monotonic()
        if time.monotonic() - self._gone_since > _ERROR_PATIENCE_S * (10 if self.restarts else 1):
            for local_rank, beat in gone if self.received is None else ():
                leave_word(self.folder, self.scratch, beat, local_rank, None)
            self._deadline = 0.0

    def _end_what_hangs(self) -> None:
        """End the rank that holds up the others; what follows is as if it had died by itself."""
        hung = self.pulse.look() if self.received is None else None
        if hung is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(hung, signal.SIGKILL)
        time.sleep(0.2)
        if is_alive(hung):  # stuck in the kernel: torch's agent waits for it
            self._deadline = time.monotonic() + _ERROR_PATIENCE_S

    def on_signal(self, number: int, frame: object) -> None:
        """Preempted: pass it on. First signal: have the agent end its workers. Second, or preempted twice: kill."""
        del frame
        if self.preemption_flag is not None and number in self.preemption_signals and number not in self.told:
            self.told.append(number)
            self.preemption_flag.set()
        elif self.received is None:
            self.received = number
            self._deadline = time.monotonic() + _TERM_PATIENCE_S
            if number in self.told:
                self._deadline = 0.0
            elif self.process is not None and self.process.poll() is None:
                self.process.send_signal(signal.SIGTERM)
        else:
            self._deadline = 0.0
