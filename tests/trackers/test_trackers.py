"""Trackers: one of the user's own as docs/trackers.md has it, and the vendors' own clients with a real server."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import TINY, Forked, clean_environment
from tests.docs.reader import write_files

PAGE = Path(__file__).parents[2] / "docs" / "trackers.md"
CLIENTS = Path(sys.prefix) / "trackers"
needs_clients = pytest.mark.skipif(
    not (CLIENTS / "mlflow").is_dir(),
    reason=f"no {CLIENTS}: make installs the clients there, where Python is 3.10 or newer",
)
LINES = ["--config-dir", "my_conf", "logger=lines"]


@pytest.fixture
def lines(exp):
    """What the tracker of the page has written."""
    write_files(PAGE, exp.folder, python=["my_tracker.py"], yaml=["my_conf/logger/lines.yaml"])
    return lambda: exp.path("lines.txt").read_text().splitlines()


def test_a_tracker_of_ones_own_is_told_of_a_run_that_goes_on(exp, lines):
    def train(*arguments):
        done = exp(*LINES, *TINY, "output_dir=run", *arguments)
        assert done.returncode == 0, done.stdout + done.stderr

    train()
    said = lines()
    assert said[0].startswith("run: lr 0.0005")
    assert [line.split()[:2] for line in said if "train/loss" in line] == [["2", "train/loss"], ["4", "train/loss"]]
    assert f"4 test/mse {exp.result('run')['metric']:.4f}" in said
    assert said[-1] == f"completed: {exp.result('run')['metric']:.4f}"
    train("max_steps=6", "resume=auto")
    later = lines()[len(said) :]
    assert later[0] == "run goes on"
    assert [line.split()[:2] for line in later if "train/loss" in line] == [["6", "train/loss"]]
    train("overwrite=true")
    assert "run: lr 0.0005" in lines()[len(said) + len(later)]


def test_what_a_tracker_raises_is_a_warning_and_can_be_made_up_for(exp, lines):
    (exp.folder / "lines.txt").mkdir()
    done = exp(*LINES, *TINY, "logger.patience_s=1", "output_dir=run")
    assert done.returncode == 0, done.stderr
    assert "IsADirectoryError" in done.stdout
    assert "python -m exp task=track logger=lines run=" in done.stdout
    (exp.folder / "lines.txt").rmdir()
    again = [*LINES, "task=track", "run=run"]
    assert exp(*again).returncode == 0
    said = lines()
    assert [line.split()[0] for line in said if "train/loss" in line] == ["2", "4"]
    assert exp(*again).returncode == 0
    assert [line for line in lines()[len(said) :] if "/" in line] == []  # nothing twice


@pytest.mark.slow
def test_a_run_that_is_killed_is_closed_afterwards(exp, lines):
    process = Forked(
        exp.folder, *LINES, *TINY, "max_steps=100000", "max_epochs=null", "val_every=1000", "output_dir=run"
    )
    while not exp.path("lines.txt").exists() or "train/loss" not in exp.path("lines.txt").read_text():
        time.sleep(0.2)
        assert process.poll() is None
    process.kill()
    process.communicate(60)
    assert json.loads(exp.path("run/trackers/lines.json").read_text())["closed"] is False
    done = exp(*LINES, "task=track", "run=run")
    assert done.returncode == 1, "the page's tracker asks for the metric of a run that has none"
    assert "KeyError" in json.loads(exp.path("run/trackers/lines.json").read_text())["trouble"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["logger.trackers.lines._target_=my_tracker.Line"], 2, "my_tracker"),
        (["logger.trackers.lines._target_=exp.metrics.Evaluator"], 2, "no subclass of exp.trackers.Tracker"),
        (["+logger.trackers.lines.colour=red"], 2, "colour"),
        (["task=track", "run=null"], 2, "task=track needs run="),
        (["task=track", "run=here", "logger=none"], 2, "task=track needs logger="),
    ],
)
def test_what_cannot_be_is_said_before_anything_starts(exp, lines, arguments, code, words):
    done = exp(*LINES, *TINY, *arguments, "output_dir=run")
    assert (done.returncode, words in done.stderr.splitlines()[0]) == (code, True), done.stderr
    assert not exp.path("run").exists()


def test_a_client_that_is_missing_is_told_with_the_command_that_brings_it(exp):
    done = exp(*TINY, "logger=swanlab", "output_dir=run", fresh=True)
    assert done.returncode == 3
    assert "pip install swanlab" in done.stderr.splitlines()[0]


# -- the vendors' clients ---------------------------------------------------------------------------------------------


def with_clients(**extra):
    return {"PYTHONPATH": str(CLIENTS), "WANDB_API_KEY": "", "HOME": extra.pop("home", os.environ["HOME"]), **extra}


def python(code: str, *arguments: str) -> list:
    """JSON that a program prints which has the clients."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=clean_environment(**with_clients()), capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


READ_EVENTS = """
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
found = EventAccumulator(sys.argv[1])
found.Reload()
tags = found.Tags()
print(json.dumps([[[e.step, e.value] for e in found.Scalars("train/loss")], tags["images"], tags["scalars"]]))
"""
READ_OFFLINE = """
import json, struct, sys
from wandb.proto import wandb_internal_pb2
data = open(sys.argv[1], "rb").read()
place, whole, rows, keys = 7, b"", [], {}
while place < len(data):
    if 32768 - place % 32768 < 7:  # LevelDB's log format: no header fits into the end of a block
        place += 32768 - place % 32768
        continue
    length, kind = struct.unpack("<HB", data[place + 4 : place + 7])
    whole += data[place + 7 : place + 7 + length]
    place += 7 + length
    if kind not in (1, 4):
        continue
    record, whole = wandb_internal_pb2.Record.FromString(whole), b""
    if record.WhichOneof("record_type") == "history":
        rows.append({item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item})
    if record.WhichOneof("record_type") == "run":
        keys.update({item.key: json.loads(item.value_json) for item in record.run.config.update})
print(json.dumps([rows, keys]))
"""


@needs_clients
@pytest.mark.slow
def test_files_of_clients_that_work_without_a_server_are_read_back(exp, tmp_path):
    done = exp(
        *TINY, "logger=[tensorboard,wandb,swanlab]", "plots=true", "output_dir=run", **with_clients(home=str(tmp_path))
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    losses = exp.losses("run")
    scalars, images, names = python(READ_EVENTS, str(exp.path("run/tensorboard")))
    assert dict(scalars) == pytest.approx(losses)
    assert "plots/curves" in images
    assert {"val/mse", "test/mse"} <= set(names)
    (offline,) = exp.path("run/trackers/wandb").glob("offline-run-*/*.wandb")
    rows, keys = python(READ_OFFLINE, str(offline))
    assert {row["step"]: row["train/loss"] for row in rows if "train/loss" in row} == pytest.approx(losses)
    assert keys["optim.lr"] == 0.0005
    assert any("plots/curves" in row for row in rows)
    assert any(exp.path("run/trackers/swanlab").glob("run-*"))


class Server:
    """``mlflow server`` on loopback, over a database in a folder."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.folder = folder
        self.uri = f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port)),
                    *("--workers", "1", "--backend-store-uri", f"sqlite:///{self.folder}/server.db"),
                    *("--artifacts-destination", str(self.folder / "artifacts")),
                ],
                env=clean_environment(**with_clients()), stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        deadline = time.monotonic() + 240
        while True:
            try:
                with socket.create_connection(("127.0.0.1", self.port), timeout=1):
                    return
            except OSError:
                lost = time.monotonic() > deadline or self.process.poll() is not None
                assert not lost, (self.folder / "server.log").read_text()
                time.sleep(0.3)

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def server(tmp_path):
    folder = tmp_path / "mlflow"
    folder.mkdir()
    server = Server(folder)
    server.start()
    yield server
    server.kill()


READ_MLFLOW = """
import json, sys
from mlflow import MlflowClient
client = MlflowClient(tracking_uri=sys.argv[1])
found = []
for experiment in client.search_experiments():
    for run in client.search_runs([experiment.experiment_id]):
        losses = {m.step: m.value for m in client.get_metric_history(run.info.run_id, "train/loss")}
        files = [f.path for f in client.list_artifacts(run.info.run_id)]
        found.append([run.info.run_id, run.info.run_name, run.info.status, losses, run.data.params, run.data.tags,
                      files, run.data.metrics])
print(json.dumps(found))
"""


@needs_clients
@pytest.mark.slow
def test_a_server_that_dies_costs_a_warning_and_is_told_the_rest_later(exp, server):
    environment = with_clients(MLFLOW_TRACKING_URI=server.uri)
    process = Forked(
        exp.folder, *TINY, "logger=mlflow", "logger.patience_s=4", "max_steps=600", "max_epochs=null", "val_every=300",
        "output_dir=run", **environment,
    )  # fmt: skip
    state = exp.path("run/trackers/mlflow.json")
    while not state.is_file():
        time.sleep(0.1)
        assert process.poll() is None, process.communicate()
    server.kill()
    output, errors = process.communicate(280)
    assert process.returncode == 0, errors
    assert "mlflow is switched off for this run" in output
    assert "Traceback" not in output + errors
    server.start()
    done = exp("task=track", "logger=mlflow", "run=run", **environment)
    assert done.returncode == 0, done.stderr
    ((_, name, status, losses, keys, tags, files, metrics),) = python(READ_MLFLOW, server.uri)
    assert {int(step): loss for step, loss in losses.items()} == pytest.approx(exp.losses("run"))
    assert (name, status, keys["optim.lr"], tags["status"]) == ("run", "FINISHED", "0.0005", "completed")
    assert {"config.yaml", "result.json", "env.json"} <= set(files)
    assert metrics["metric"] == pytest.approx(exp.result("run")["metric"])


@needs_clients
@pytest.mark.slow
def test_without_a_server_the_jobs_of_a_sweep_share_a_database_and_a_tag(exp):
    done = exp("-m", *TINY, "logger=mlflow", "seed=1,2", "output_dir=sweep", **with_clients())
    assert done.returncode == 0, done.stdout + done.stderr
    found = python(READ_MLFLOW, f"sqlite:///{exp.path('outputs/mlflow/mlflow.db')}")
    runs = {name: (status, tags["sweep"]) for _, name, status, _, _, tags, _, _ in found}
    assert runs == {"sweep/0": ("FINISHED", "sweep"), "sweep/1": ("FINISHED", "sweep")}
