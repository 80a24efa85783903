"""launcher=torchrun: workers under torch's elastic agent, in a session of their own, supervised from here."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from typing import TYPE_CHECKING, Any

from exp.errors import EXIT_FAILED, EXIT_OK
from exp.launcher.base import STORE_VARIABLE, Launcher, Outcome, this_host
from exp.launcher.failures import collect_failures, exit_code_of
from exp.launcher.processes import JOB_VARIABLE, kill_job
from exp.runfolder import read_json

if TYPE_CHECKING:
    from pathlib import Path

    from exp.runfolder import RunFolder

__all__ = ["TorchrunLauncher"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_TERM_PATIENCE_S = 4.0


class TorchrunLauncher(Launcher):
    """Starts the agent as a process of its own, so that this one never imports torch or holds a device."""

    def launch(self, folder: RunFolder, nproc: int) -> Outcome:
        """Run the workers; whatever ends the run, no process of it is left behind."""
        from exp.launcher.ports import check_endpoint

        if self.rdzv_endpoint is not None:
            check_endpoint(self.rdzv_endpoint)
        for stale in folder.logs.glob("rank*.error.json"):
            stale.unlink()
        name = "agent" if self.nnodes == 1 else f"agent-{this_host()}-{os.getpid()}"
        job = secrets.token_hex(8)
        with tempfile.TemporaryDirectory(prefix="exp-") as scratch, (folder.logs / f"{name}.log").open("ab") as log:
            order = self._order(folder, nproc, scratch, folder.logs / f"{name}.json")
            process = subprocess.Popen(
                [sys.executable, "-m", "exp.launcher.agent", json.dumps(order)],
                stdin=subprocess.DEVNULL,
                stderr=log,
                env=self._environment(job, scratch),
                start_new_session=True,
            )
            supervisor = _Supervisor(process, job)
            try:
                received = supervisor.wait()
            finally:
                unkillable = kill_job(job)
        return self._outcome(folder, folder.logs / f"{name}.json", received, unkillable)

    def _order(self, folder: RunFolder, nproc: int, scratch: str, report: Path) -> dict[str, Any]:
        return {
            "run_dir": str(folder.path),
            "worker": self.worker,
            "nproc": nproc,
            "nnodes": self.nnodes,
            "endpoint": self.rdzv_endpoint or f"{scratch}/rendezvous",
            "rdzv_id": self.rdzv_id,
            "max_restarts": self.max_restarts,
            "timeout_s": self.timeout_s,
            "scratch": scratch,
            "report": str(report),
            "parent": os.getpid(),
        }

    def _environment(self, job: str, scratch: str) -> dict[str, str]:
        environment = {**os.environ, JOB_VARIABLE: job}
        if self.nnodes == 1:
            environment[STORE_VARIABLE] = scratch
            # Torch's agent would open a TCP store on every interface, and gloo bind to the host's public address.
            environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        return environment

    def _outcome(self, folder: RunFolder, path: Path, received: int | None, unkillable: list[int]) -> Outcome:
        report = read_json(path) or {"exits": [], "restarts": 0, "succeeded": False, "error": "the agent was killed"}
        failures = [] if report["succeeded"] else collect_failures(folder, report["exits"], this_host())
        outcome = Outcome(EXIT_OK, report["restarts"], failures, unkillable=unkillable)
        if received is not None:
            outcome.interrupted_by = signal.Signals(received).name
            outcome.exit_code = 128 + received
        elif not report["succeeded"]:
            outcome.exit_code = exit_code_of(failures[0]) if failures else EXIT_FAILED
            outcome.detail = report.get("error")
        return outcome


class _Supervisor:
    """Waits for the agent, and hands signals on to it."""

    def __init__(self, process: subprocess.Popen[bytes], job: str) -> None:
        self.process = process
        self.job = job
        self.received: int | None = None
        self._deadline: float | None = None

    def wait(self) -> int | None:
        """Wait until the agent has ended; returns the signal that this process was sent, if any."""
        before = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        try:
            while True:
                try:
                    self.process.wait(timeout=0.2)
                    return self.received
                except subprocess.TimeoutExpired:
                    if self._deadline is not None and time.monotonic() > self._deadline:
                        self._deadline = None
                        kill_job(self.job)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: object) -> None:
        """First signal: ask the agent to end its workers. Second: kill them now."""
        del frame
        if self.received is None:
            self.received = number
            self._deadline = time.monotonic() + _TERM_PATIENCE_S
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGTERM)
        else:
            self._deadline = 0.0
