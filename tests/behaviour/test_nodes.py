"""Several nodes: whoever reaches the meeting point of a job cannot guess its name there, and runs no code."""

from __future__ import annotations

import base64
import json
import os
import pickle
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.behaviour.conftest import FORECAST, LONG, family, has_steps, wait_for
from tests.conftest import free_port


class _Attack:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self):
        return Path.touch, (self.file,)


def listening(port: int) -> set[str]:
    """The addresses at which somebody listens on a port, as the kernel writes them."""
    lines = [
        line.split() for table in ("tcp", "tcp6") for line in Path("/proc/net", table).read_text().splitlines()[1:]
    ]
    return {cells[1].rpartition(":")[0] for cells in lines if cells[3] == "0A" and int(cells[1][-4:], 16) == port}


@pytest.mark.legacy
def test_a_stranger_at_the_meeting_point_runs_no_code(exp, start):
    host = "127.0.0.1"
    port = free_port()
    process = start(*FORECAST, "launcher.nnodes=2", f"launcher.rdzv_endpoint={host}:{port}", "output_dir=run")
    wait_for(lambda: listening(port), process)
    if int(torch.__version__.split(".")[0]) >= 2:  # older torch listens on every interface
        assert listening(port) == {"0100007F"}
    secret = json.loads((exp.path("run") / ".lock").read_text())["secret"]
    shown = [Path(f"/proc/{pid}/cmdline").read_text() for pid in family(process.pid)]  # to every user of the machine
    assert any("exp.launcher.agent" in line for line in shown)
    assert not any(secret in line for line in shown)
    store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=60))
    store.set_timeout(timedelta(seconds=1))
    with pytest.raises(RuntimeError):
        store.get("torch.rendezvous.exp")  # what torch calls it, where the job's id is the default
    if not hasattr(store, "list_keys"):  # where a name that is not known cannot be attacked
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        return
    names = []
    wait_for(lambda: names.extend(name for name in store.list_keys() if "rendezvous" in name) or names, process)
    store.set(names[0], base64.b64encode(pickle.dumps(_Attack(exp.folder / "attacked"))).decode())
    process.communicate(timeout=100)
    assert process.returncode == 1
    assert not (exp.folder / "attacked").exists()


@pytest.mark.extended
def test_a_node_with_another_configuration_is_refused_and_one_records_how_the_run_failed(exp, start):
    """All workers read the configuration of the first node; with another number of them the places would be wrong."""
    job = [*LONG, "launcher.nnodes=2", f"launcher.rdzv_endpoint=127.0.0.1:{free_port()}", "output_dir=run"]
    first = start(*job, "seed=1")
    wait_for((exp.path("run") / "config.yaml").is_file, first)
    for words, named in (
        (["seed=2", "max_steps=9"], "seed=2 (there: 1)"),
        (["seed=1", "nproc=2"], "nproc=2 (there: 1)"),
    ):
        done = exp(*job, *words)
        assert done.returncode == 2, done.stderr
        error = done.stderr[done.stderr.index("error: ") :].splitlines()[0]
        assert named in error
        assert str(first.pid) in error
    assert "seed: 1\n" in (exp.path("run") / "config.yaml").read_text()

    second = start(*job, "seed=1")
    wait_for(has_steps(exp.path("run")), first, second)
    (worker,) = [pid for pid in family(second.pid) if Path(f"/proc/{pid}/comm").read_text().startswith("exp-rank")]
    os.kill(worker, signal.SIGKILL)
    result, written = exp.path("run") / "result.json", set()
    while None in (first.poll(), second.poll()):
        written |= {(result.stat().st_ino, result.stat().st_mtime_ns)} if result.is_file() else set()
        time.sleep(0.01)
    said = [process.communicate(timeout=60) for process in (first, second)]
    assert [first.returncode, second.returncode] == [1, 1], said
    assert len(written | {(result.stat().st_ino, result.stat().st_mtime_ns)}) == 1
    assert "SIGKILL" in exp.result("run")["error"]["message"]


@pytest.mark.extended
def test_ranks_that_are_more_on_one_node_than_on_another_are_refused(exp, start):
    names = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    settings = [*FORECAST, "launcher=external", "output_dir=run"]
    places = ("0401", "1401", "2402", "3412")
    started = [start(*settings, **dict(zip(names, place)), **master) for place in places]
    said = [process.communicate(timeout=240)[1] for process in started]
    assert [process.returncode for process in started] == [2] * 4, said
    assert "rank 2" in said[0]
    assert "one of 2" in said[0]
