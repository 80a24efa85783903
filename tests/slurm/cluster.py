"""A real, private Slurm on this machine: pretended nodes with more cores than there are, and eight cards each.

Needs root and Debian's slurmctld, slurmd, slurm-client and munge. Everything lies in one folder and nothing in /etc is
touched. A node is a slurmd in a mount and UTS namespace of its own, with a host name of its own that resolves there,
and a disk of its own at :attr:`Cluster.scratch`.
"""

from __future__ import annotations

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
SlurmctldParameters={parameters}
KillWait=5
ReturnToService=2
FirstJobId={first_job}
MaxArraySize=4
PartitionName=main Nodes=ALL Default=YES PriorityTier=1 GraceTime=20
PartitionName=urgent Nodes=ALL PriorityTier=10
PartitionName=small Nodes=ALL MaxNodes=1 MaxTime=10
"""


def why_not() -> str | None:
    """What is missing for a cluster, or None."""
    missing = [program for program in _PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"no real Slurm here: {', '.join(missing)} not found (Debian: slurmctld slurmd slurm-client munge)"
    if os.getuid() != 0:
        return "a private Slurm needs root"
    return None


class Cluster:
    """Starts with :meth:`start`, ends with :meth:`stop`.

    Args:
        nodes: how many.
        cpus: of each node.
        cards: of each node, as the generic resource ``gcu``.
        send_signal: whether a job that is preempted gets the signal that it has asked for, not SIGTERM alone.
    """

    def __init__(self, nodes: int = 2, cpus: int = 4, cards: int = 8, send_signal: bool = True) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # short: it holds sockets
        self.folder.chmod(0o755)  # munge refuses a socket that not everyone could reach
        self.scratch = self.folder / "scratch"
        self.nodes = [f"n{number + 1}" for number in range(nodes)]
        self.environment = {"SLURM_CONF": str(self.folder / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._cpus, self._cards, self._send_signal = cpus, cards, send_signal

    def start(self) -> None:
        """Start all daemons, and wait until the nodes are idle."""
        folder = self.folder
        for name in ("ctld", "spool", "log", "scratch"):
            (folder / name).mkdir()
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        self._write_configuration()
        self._daemon(
            "munged", "munged", "-F", f"--key-file={key}", f"--socket={folder}/munge.socket",
            f"--pid-file={folder}/munged.pid", f"--seed-file={folder}/munged.seed",
            f"--log-file={folder}/log/munged.own.log",
        )  # fmt: skip
        self._wait(
            "munge", lambda: self.run("munge", "-n", "-S", f"{folder}/munge.socket", check=False).returncode == 0
        )
        self._daemon("slurmctld", "slurmctld", "-D")
        self._wait("slurmctld", lambda: self.run("scontrol", "ping", check=False).returncode == 0)
        for node in self.nodes:
            script = (
                'mount --bind "$1/hosts" /etc/hosts && mount -t tmpfs -o size=64m scratch "$1/scratch" '
                '&& hostname "$2" && exec slurmd -D -N "$2"'
            )
            self._daemon(node, "unshare", "--mount", "--uts", "sh", "-c", script, "sh", str(folder), node)
        self._wait("slurmd", lambda: self.states().count("idle") == len(self.nodes))

    def _write_configuration(self) -> None:
        port = _free_ports(1 + len(self.nodes))
        lines = _CONF.format(
            host=socket.gethostname(), port=port, folder=self.folder, first_job=int(time.time()) % 60000000,
            parameters="preempt_send_user_signal" if self._send_signal else "",
        ).splitlines()  # fmt: skip
        hosts = Path("/etc/hosts").read_text(encoding="utf-8").rstrip() + "\n"
        for number, node in enumerate(self.nodes, 1):
            hosts += f"127.0.1.{number} {node}\n"
            lines.append(
                f"NodeName={node} NodeAddr=127.0.1.{number} Port={port + number} CPUs={self._cpus} RealMemory=8000 "
                f"Gres=gcu:{self._cards} State=UNKNOWN"
            )
        nodes_first = [line for line in lines if not line.startswith("PartitionName")]
        partitions = [line for line in lines if line.startswith("PartitionName")]
        kept = [line for line in nodes_first + partitions if not line.endswith("=")]
        (self.folder / "slurm.conf").write_text("\n".join(kept) + "\n", encoding="utf-8")
        (self.folder / "gres.conf").write_text(f"Name=gcu Count={self._cards}\n", encoding="utf-8")
        (self.folder / "hosts").write_text(hosts, encoding="utf-8")

    def _daemon(self, name: str, *command: str) -> None:
        with (self.folder / "log" / f"{name}.log").open("wb") as log:
            self._daemons.append(
                subprocess.Popen(
                    command, env={**os.environ, **self.environment}, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    start_new_session=True,
                )
            )  # fmt: skip

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

    def states(self) -> list[str]:
        """Of the nodes, such as ``idle``."""
        return self.run("sinfo", "-h", "-N", "-p", "main", "-o", "%t", check=False).stdout.split()

    def jobs(self) -> list[str]:
        """Ids of the jobs that have not ended."""
        return self.run("squeue", "-h", "-o", "%i", check=False).stdout.split()

    def clear(self) -> None:
        """Cancel everything, and wait until the nodes are free."""
        jobs = self.jobs()
        if jobs:
            self.run("scancel", *jobs, check=False)
        self._wait("an idle cluster", lambda: self.states().count("idle") == len(self.nodes))

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
    for _ in range(100):
        first = random.randrange(10000, 19000)
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("", port))
        except OSError:
            continue
        return first
    raise RuntimeError("no free ports")
