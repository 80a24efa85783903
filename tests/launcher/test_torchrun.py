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

    def agent(self) -> int:
        return next(pid for pid in self.alive() if Path(f"/proc/{pid}/comm").read_text() == "exp-agent\n")

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


def test_the_first_failing_rank_comes_first(job):
    running = job("raise")
    running.wait_joined()
    outcome = running.outcome(timeout=10)
    assert outcome["exit_code"] == 1
    assert outcome["first"]["rank"] == 1
    assert outcome["failed"] in ([1], [1, 0])
    lines = outcome["text"].splitlines()
    assert lines[0].startswith("rank 1 (local_rank 1, ")
    assert "raises ValueError: the second rank does not like it (worker_all_reduce.py, line " in lines[0]
    assert "Traceback" in (running.folder / "logs" / "rank1.log").read_text()
    running.assert_gone(0)


@pytest.mark.slow
def test_an_error_ends_the_job_even_beside_a_rank_that_ignores_the_end(job):
    running = job("raise-stubborn")
    running.wait_joined()
    outcome = running.outcome(timeout=10)
    assert outcome["exit_code"] == 1
    assert outcome["failed"] == [1]
    assert "raises ValueError: the second rank does not like it (worker" in outcome["text"].splitlines()[0]
    running.assert_gone(0)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("SIGKILL", "killed by SIGKILL (out of memory, or kill -9)"),
        pytest.param("SIGABRT", "killed by SIGABRT (a crash in native code)", marks=pytest.mark.slow),
    ],
)
def test_a_killed_rank_is_named(job, body, text):
    running = job(body)
    outcome = running.outcome()
    assert outcome["exit_code"] == 1
    assert outcome["first"]["rank"] == 1
    assert outcome["text"].splitlines()[0].endswith(text)
    assert outcome["failed"] in ([1], [1, 0])
    running.assert_gone(0)


def test_all_ranks_are_restarted_when_one_is_killed(job):
    running = job("SIGKILL", max_restarts=1)
    outcome = running.outcome()
    assert outcome["exit_code"] == 0, outcome
    assert outcome["restarts"] == 1
    assert [path.read_text().split()[0] for path in running.folder.glob("joined-1-*")] == ["1.0", "1.0"]
    running.assert_gone(0)


@pytest.mark.parametrize(
    ("number", "code"),
    [
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow),
        (signal.SIGTERM, 143),
        pytest.param(signal.SIGHUP, 129, marks=pytest.mark.slow),
    ],
    ids=["INT", "TERM", "HUP"],
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


def test_killing_the_agent_leaves_no_worker(job, tmp_path):
    """Killing the parent: tests/launcher/test_leftovers.py."""
    logs = tmp_path / "run" / "logs"
    logs.mkdir(parents=True)
    # What an earlier launch in the same folder has left says nothing of this one.
    (logs / "agent.json").write_text('{"succeeded": true, "exits": [], "restarts": 0, "error": null}')
    running = job("sleep")
    running.wait_joined()
    os.kill(running.agent(), signal.SIGKILL)
    outcome = running.outcome(timeout=10)
    assert outcome["exit_code"] == 1
    assert "torch's agent was killed by SIGKILL" in outcome["text"]
    running.assert_gone()


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


@pytest.mark.slow
def test_a_node_that_never_comes_ends_the_run(job):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    alone = job(nproc=1, nnodes=2, rdzv_endpoint=f"127.0.0.1:{port}", timeout_s=4)
    outcome = alone.outcome(timeout=60)
    assert outcome["exit_code"] == 1
    assert f"the 2 nodes did not meet at launcher.rdzv_endpoint=127.0.0.1:{port} within" in outcome["text"]
    alone.assert_gone(0)
