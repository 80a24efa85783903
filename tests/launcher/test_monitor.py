"""The monitor of a worker, told to end at about the moment when its worker ends by itself."""

from __future__ import annotations

import subprocess
import sys

from tests.conftest import clean_environment

# Pairs of a monitor and a worker, one after the other: the worker ends, and SIGTERM comes, within the same millisecond.
PAIRS = """
import os, random, signal, sys, time
from exp.launcher.monitor import go_on_monitored
from exp.runfolder import RunFolder
folder, ends = RunFolder(sys.argv[1]), set()
os.environ.update(RANK="0", LOCAL_RANK="0", EXP_AGENT_PID=str(os.getpid()), EXP_SCRATCH=sys.argv[1])
for _ in range(300):
    parent, (reads, writes) = os.getpid(), os.pipe()
    monitor = os.fork()
    if monitor == 0:
        if go_on_monitored(folder, parent):
            os.write(writes, b"x")
            time.sleep(0.001 * random.random())
        os._exit(0)
    os.read(reads, 1)
    time.sleep(0.002 * random.random())
    os.kill(monitor, signal.SIGTERM)
    ends.add(os.waitpid(monitor, 0)[1])
    os.close(reads), os.close(writes)
print(sorted(ends))
"""


def test_the_end_of_a_worker_and_being_told_to_end_it_may_come_together(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", PAIRS, str(tmp_path)],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stderr == ""
    assert done.stdout.split() in (["[0,", "15]"], ["[0]"], ["[15]"])  # the worker's end, or SIGTERM: never an error


# A worker that dies in the clean-up of its device, after all is written, and one that dies before.
DYING = """
import os, signal, sys
from exp import heartbeat
from exp.heartbeat import Stage
from exp.launcher.monitor import go_on_monitored
from exp.runfolder import RunFolder
folder, scratch = RunFolder(sys.argv[1]), sys.argv[1]
folder.logs.mkdir()
os.environ.update(RANK="0", LOCAL_RANK="0", EXP_AGENT_PID=str(os.getpid()), EXP_SCRATCH=scratch)
heartbeat.make_file(scratch, 1)
parent = os.getpid()
for stage in (Stage.DONE, Stage.TEST):
    monitor = os.fork()
    if monitor == 0:
        if go_on_monitored(folder, parent):
            heartbeat.begin(scratch, 0, 0)
            heartbeat.beat(stage)
            os.kill(os.getpid(), signal.SIGILL)
        os._exit(0)
    print(os.waitpid(monitor, 0)[1] & 127, folder.error_file(0).exists(), flush=True)
"""


def test_a_worker_that_dies_in_its_clean_up_has_come_to_its_end(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", DYING, str(tmp_path)],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.split() == ["0", "False", "4", "True"], done.stderr
    assert "killed by SIGILL, in the clean-up of its device" in (tmp_path / "logs" / "rank0.log").read_text()
