"""A real, private Slurm on this machine: pretended nodes with more cores than there are, and eight cards each.

Needs root and Debian's slurmctld, slurmd, slurm-client and munge. Everything lies in one folder and nothing in /etc is
touched. A node is a slurmd in a mount and UTS namespace of its own, with a host name of its own that resolves there.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

__all__ = ["Cluster", "why_not"]

_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "unshare")
_NODES = ("n1", "n2")
_CONF = """
ClusterName=lab
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/ctld
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/ctld/pid
SlurmdPidFile={folder}/spool/%n.pid
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gcu
MpiDefault=none
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
KillWait=5
ReturnToService=2
FirstJobId={first_job}
{nodes}
PartitionName=main Nodes=ALL Default=YES PriorityTier=1 GraceTime=20
PartitionName=urgent Nodes=ALL PriorityTier=10
"""
_NODE = "NodeName={name} NodeAddr={address} Port={port} CPUs=4 RealMemory=8000 Gres=gcu:8 State=UNKNOWN"
_BEGIN_NODE = """
mount --bind "$1/hosts" /etc/hosts && hostname "$2" || exit
exec slurmd -D -N "$2"
"""


def why_not() -> str | None:
    """What is missing for a cluster, or None."""
    missing = [program for program in _PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"no real Slurm here: {', '.join(missing)} not found (Debian: slurmctld slurmd slurm-client munge)"
    return "a private Slurm needs root" if os.getuid() != 0 else None


class Cluster:
    """Starts with :meth:`start`, ends with :meth:`stop`."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # short: it holds sockets
        self.folder.chmod(0o755)  # munge refuses a socket that not everyone could reach
        self.environment = {"SLURM_CONF": str(self.folder / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start all daemons, and wait until the nodes are idle."""
        folder = self.folder
        for name in ("ctld", "spool", "log"):
            (folder / name).mkdir()
        (folder / "munge.key").touch(0o600)
        (folder / "munge.key").write_bytes(os.urandom(128))
        self._write_configuration()
        self._daemon(
            "munged", "munged", "-F", f"--key-file={folder}/munge.key", f"--socket={folder}/munge.socket",
            f"--pid-file={folder}/munged.pid", f"--seed-file={folder}/munged.seed",
            f"--log-file={folder}/log/munged.own.log",
        )  # fmt: skip
        self._wait("munge", lambda: self._succeeds("munge", "-n", "-S", f"{folder}/munge.socket"))
        self._daemon("slurmctld", "slurmctld", "-D")
        self._wait("slurmctld", lambda: self._succeeds("scontrol", "ping"))
        for node in _NODES:
            self._daemon(node, "unshare", "--mount", "--uts", "sh", "-c", _BEGIN_NODE, "sh", str(folder), node)
        self._wait("slurmd", self._is_idle)

    def _write_configuration(self) -> None:
        port = _free_ports(1 + len(_NODES))
        hosts, nodes = Path("/etc/hosts").read_text(encoding="utf-8").rstrip() + "\n", []
        for number, name in enumerate(_NODES, 1):
            address = f"127.0.1.{number}"
            hosts += f"{address} {name}\n"
            nodes.append(_NODE.format(name=name, address=address, port=port + number))
        text = _CONF.format(
            host=socket.gethostname(), port=port, folder=self.folder, first_job=int(time.time()) % 60000000,
            nodes="\n".join(nodes),
        )  # fmt: skip
        for name, content in (("slurm.conf", text), ("gres.conf", "Name=gcu Count=8\n"), ("hosts", hosts)):
            (self.folder / name).write_text(content, encoding="utf-8")

    def _daemon(self, name: str, *command: str) -> None:
        environment = {**os.environ, **self.environment}
        with (self.folder / "log" / f"{name}.log").open("wb") as log:
            daemon = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self._daemons.append(daemon)

    def _wait(self, what: str, condition) -> None:
        deadline = time.monotonic() + 120
        while not condition():
            if time.monotonic() > deadline:
                logs = {path.name: path.read_text(errors="replace")[-500:] for path in self.folder.glob("log/*.log")}
                raise RuntimeError(f"{what} did not come up: {logs}")
            time.sleep(0.1)

    def run(self, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """A client of this Slurm's."""
        return subprocess.run(
            command, env={**os.environ, **self.environment}, capture_output=True, text=True, timeout=120, check=check
        )

    def _succeeds(self, *command: str) -> bool:
        return self.run(*command, check=False).returncode == 0

    def _is_idle(self) -> bool:
        states = self.run("sinfo", "-h", "-N", "-p", "main", "-o", "%t", check=False).stdout.split()
        return states == ["idle"] * len(_NODES)

    def jobs(self) -> list[str]:
        """Ids of the jobs that have not ended."""
        return self.run("squeue", "-h", "-o", "%i", check=False).stdout.split()

    def clear(self) -> None:
        """Cancel everything, and wait until the nodes are free."""
        jobs = self.jobs()
        if jobs:
            self.run("scancel", *jobs, check=False)
        self._wait("an idle cluster", self._is_idle)

    def stop(self) -> None:
        """End the jobs, then the daemons."""
        try:
            self.clear()
        finally:
            for daemon in reversed(self._daemons):
                daemon.terminate()
                try:
                    daemon.wait(timeout=5)
                except subprocess.TimeoutExpired:
                    daemon.kill()
                    daemon.wait()
            shutil.rmtree(self.folder, ignore_errors=True)


def _free_ports(count: int) -> int:
    """The first of some ports in a row that nobody listens on, below those that launchers choose from."""
    while True:
        first = random.randrange(10000, 19000)
        with contextlib.ExitStack() as probes, contextlib.suppress(OSError):
            for port in range(first, first + count):
                probes.enter_context(socket.socket()).bind(("", port))
            return first
