"""The torchrun launcher through real processes, signals and sockets."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import clean_environment

ROOT = Path(__file__).parents[2]


class Job:
    """A parent process that launches test workers, and what it leaves behind."""

    def __init__(self, folder: Path, body: str = "", preexec_fn=None, **settings) -> None:
        self.folder = folder
        self.mark = f"{folder}-{os.getpid()}"
        self.scratch = folder.parent / "scratch"
        self.scratch.mkdir(exist_ok=True)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.launcher.parent", str(folder), json.dumps({"nproc": 2, **settings})],
            cwd=ROOT,
            env=clean_environment(TEST_BODY=body, TEST_MARK=self.mark, TMPDIR=str(self.scratch)),
            preexec_fn=preexec_fn,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def outcome(self, timeout: float = 60) -> dict:
        output, errors = self.process.communicate(timeout=timeout)
        assert output.strip(), errors
        return json.loads(output.strip().splitlines()[-1])

    def alive(self) -> dict[int, str]:
        """The job's living processes with their command lines, the parent left out."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if f"TEST_MARK={self.mark}".encode() not in (entry / "environ").read_bytes().split(b"\0"):
                    continue
                if (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z":
                    continue
                found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
            except OSError:
                continue
        found.pop(self.process.pid, None)
        return found

    def wait_joined(self, restart: int = 0) -> None:
        deadline = time.monotonic() + 60
        while len(list(self.folder.glob(f"joined-{restart}-*"))) < 2:
            assert time.monotonic() < deadline, self.alive()
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.05)

    def assert_gone(self, seconds: float = 10) -> None:
        deadline = time.monotonic() + seconds
        while self.alive():
            assert time.monotonic() < deadline, f"left behind: {self.alive()}"
            time.sleep(0.05)


@pytest.fixture
def job(tmp_path):
    jobs = []

    def start(*args, **settings):
        jobs.append(Job(tmp_path / "run", *args, **settings))
        return jobs[-1]

    yield start
    for started in jobs:
        for pid in [*started.alive(), started.process.pid]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        started.process.communicate()


def test_an_error_ends_the_job_even_beside_a_rank_that_ignores_the_end(job):
    running = job("raise-stubborn")
    running.wait_joined()
    outcome = running.outcome(timeout=10)
    assert outcome["exit_code"] == 1
    assert outcome["failed"] == [1]
    running.assert_gone(0)


@pytest.mark.parametrize(
    ("number", "code"),
    [pytest.param(signal.SIGINT, 130), (signal.SIGTERM, 143)],
    ids=["INT", "TERM"],
)
def test_a_signal_ends_everything_even_a_rank_that_ignores_it(job, number, code):
    running = job("sleep")
    running.wait_joined()
    assert len(running.alive()) >= 5  # agent, two workers, two grandchildren
    running.process.send_signal(number)
    patience = 10
    if number != signal.SIGTERM:
        time.sleep(0.3)
        running.process.send_signal(number)  # once more: at once
        patience = 3
    outcome = running.outcome(timeout=patience)
    assert outcome["exit_code"] == code
    assert outcome["interrupted_by"] == number.name
    running.assert_gone(0)


def test_a_worker_whose_agent_died_before_it_came_up_ends_at_once(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "tests.launcher.worker_all_reduce", str(tmp_path)],
        cwd=ROOT,
        env=clean_environment(EXP_AGENT_PID="1"),
        timeout=20,
        check=False,
    )
    assert done.returncode == 1
    assert not list(tmp_path.iterdir())


def test_nothing_listens_beyond_the_loopback_interface_and_nohup_is_respected(job):
    with socket.socket() as everywhere:
        everywhere.bind(("", 0))
        everywhere.listen()
        assert everywhere.getsockname() in listening([os.getpid()])  # what would be found, is found
    running = job("sleep", preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    running.wait_joined()
    before = running.alive()
    assert len(before) >= 3
    assert not [place for place in listening(running.alive()) if not place[0].startswith("127.")]
    running.process.send_signal(signal.SIGHUP)
    time.sleep(1)
    assert running.process.poll() is None
    assert running.alive() == before


def listening(pids) -> list[tuple[str, int]]:
    """Addresses and ports on which the given processes listen for TCP connections."""
    inodes = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended meanwhile
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    inodes.add(os.readlink(link))
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            cells = line.split()
            if cells[3] == "0A" and f"socket:[{cells[9]}]" in inodes:
                address, port = cells[1].split(":")
                plain = len(address) == 8
                name = socket.inet_ntoa(bytes.fromhex(address)[::-1]) if plain else f"ipv6 {address}"
                found.append((name, int(port, 16)))
    return found


def agents_log(pids, port: int) -> Path:
    """The log of that agent among the given processes which listens on the port."""
    (host,) = [pid for pid in pids if port in [number for _, number in listening([pid])]]
    return Path(os.readlink(f"/proc/{host}/fd/2"))


@pytest.mark.parametrize(("max_restarts", "body"), [(0, "late"), (1, "SIGKILL")])
def test_two_agents_on_one_machine_make_one_job(job, max_restarts, body):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = {"nproc": 1, "nnodes": 2, "rdzv_endpoint": f"127.0.0.1:{port}", "timeout_s": 60}
    jobs = [job(body, max_restarts=max_restarts, **settings) for _ in range(2)]
    if body == "late":
        jobs[0].wait_joined()
        hosting = agents_log(jobs[0].alive(), port)
    outcomes = [each.outcome(timeout=90) for each in jobs]
    assert [outcome["exit_code"] for outcome in outcomes] == [0, 0], outcomes
    assert [outcome["restarts"] for outcome in outcomes] == [max_restarts, max_restarts]
    values = {path.name: path.read_text().split()[0] for path in jobs[0].folder.glob(f"joined-{max_restarts}-*")}
    assert values == {f"joined-{max_restarts}-0": "1.0", f"joined-{max_restarts}-1": "1.0"}
    for each in jobs:
        each.assert_gone(0)
    if body == "late":  # the agent whose worker has ended waits for the other's, and sends heartbeats meanwhile
        logs = {path: path.read_text() for path in (jobs[0].folder / "logs").glob("agent*.log")}
        assert "keep-alive" not in "".join(logs.values())
        assert "ERROR" not in logs[hosting], logs  # the other may find the store gone at the very end
