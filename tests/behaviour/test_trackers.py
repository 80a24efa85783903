"""Trackers: one of the user's own as docs/guide/trackers.md has it, and the vendors' own clients with a real server."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.behaviour.conftest import TINY, first_line, losses, wait_for
from tests.conftest import clean_environment, free_port

CLIENTS = Path(sys.prefix) / "trackers"
needs_clients = pytest.mark.skipif(
    not (CLIENTS / "mlflow").is_dir(),
    reason=f"no {CLIENTS}: make test-all installs the clients there, where Python is 3.10 or newer",
)
LINES = ["--config-dir", "my_conf", "logger=lines"]
DRAWS = """
import numpy as np
from mmengine.hooks import Hook


class Draws(Hook):
    def after_val_epoch(self, runner, metrics=None):
        runner.visualizer.add_scalar("mine/norm", 0.5, step=runner.iter)
        runner.visualizer.add_image("mine/first image", np.zeros((8, 9, 3), np.uint8), step=runner.iter)
"""


@pytest.fixture
def lines(exp, page):
    """What the tracker of the page has written."""
    page("trackers", python=["my_tracker.py"], yaml=["my_conf/logger/lines.yaml"])
    return lambda: exp.path("lines.txt").read_text().splitlines()


def test_a_tracker_of_ones_own_receives_a_run_and_what_goes_on_with_it(exp, lines):
    (exp.folder / "my_hook.py").write_text(DRAWS)
    hook = ("plugins=[my_hook]", "hooks=[{type: my_hook.Draws}]")
    assert exp(*LINES, *TINY, *hook, "plots=true", "output_dir=run").returncode == 0
    said = lines()
    assert "4 mine/norm 0.5000" in said
    assert (exp.path("run") / "plots" / "mine-first-image_4.png").is_file()
    assert said[0].startswith("run: lr 0.0005")
    assert [line.split()[:2] for line in said if "train/loss" in line] == [["2", "train/loss"], ["4", "train/loss"]]
    assert said[-1] == f"completed: {exp.result('run')['metric']:.4f}"
    assert exp(*LINES, *TINY, "output_dir=run", "max_steps=6", "resume=auto").returncode == 0
    later = lines()[len(said) :]
    assert [line.split()[:2] for line in later if "train/loss" in line] == [["6", "train/loss"]]
    for words, code, named in (
        (["logger.trackers.lines._target_=exp.metrics.Evaluator"], 2, "logger.trackers.lines"),
        (["+logger.trackers.lines.colour=red"], 2, "colour"),
        (["task=track", "run=null"], 2, "run"),
        (["logger.requires=[nonesuch]"], 3, "nonesuch"),
    ):
        done = exp(*LINES, *TINY, *words, "output_dir=new")
        assert (done.returncode, named in first_line(done)) == (code, True), done.stderr
    assert not exp.path("new").exists()


@pytest.mark.extended
def test_what_a_tracker_raises_is_a_warning_and_can_be_made_up_for(exp, lines):
    exp.path("lines.txt").mkdir()
    done = exp(*LINES, *TINY, "logger.patience_s=1", "output_dir=run")
    assert done.returncode == 0, done.stderr
    assert "python -m exp task=track logger=lines run=" in done.stdout
    exp.path("lines.txt").rmdir()
    for again in (2, 0):
        before = len(lines()) if exp.path("lines.txt").exists() else 0
        assert exp(*LINES, "task=track", "run=run").returncode == 0
        assert sum("train/loss" in line for line in lines()[before:]) == again  # nothing twice


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
@pytest.mark.extended
def test_files_of_clients_that_work_without_a_server_are_read_back(exp):
    loggers = ["logger=[tensorboard,wandb,swanlab]", "plots=true", "output_dir=run"]
    done = exp(*TINY, *loggers, **with_clients(home=str(exp.folder)))
    assert (done.returncode, done.stderr) == (0, "")
    trained = losses(exp.path("run"))
    scalars, images, names = python(READ_EVENTS, str(exp.path("run/tensorboard")))
    assert dict(scalars) == pytest.approx(trained)
    assert "plots/curves" in images
    assert list(dict.fromkeys(name.partition("/")[0] for name in sorted(names))) == [
        "train",
        "val",
        "values_at_the_end",
    ]
    assert {"val/mse", "values_at_the_end/mse"} <= set(names)
    (offline,) = exp.path("run/trackers/wandb").glob("offline-run-*/*.wandb")
    rows, keys = python(READ_OFFLINE, str(offline))
    assert {row["step"]: row["train/loss"] for row in rows if "train/loss" in row} == pytest.approx(trained)
    assert keys["optim.lr"] == 0.0005
    assert any(exp.path("run/trackers/swanlab").glob("run-*"))


class Server:
    """``mlflow server`` on loopback, over a database in a folder."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
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
        wait_for(self.answers, seconds=240)

    def answers(self) -> bool:
        assert self.process.poll() is None, (self.folder / "server.log").read_text()
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

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
@pytest.mark.extended
def test_a_server_that_dies_costs_a_warning_and_has_the_rest_later(exp, server, start):
    environment = with_clients(MLFLOW_TRACKING_URI=server.uri)
    words = [*TINY, "max_steps=600", "max_epochs=null", "val_every=300", "logger=mlflow", "logger.patience_s=4"]
    process = start(*words, "output_dir=run", **environment)
    wait_for(exp.path("run/trackers/mlflow.json").is_file, process)
    server.kill()
    output, errors = process.communicate(280)
    assert process.returncode == 0, errors
    assert "task=track logger=mlflow" in output
    assert "Traceback" not in output + errors
    server.start()
    done = exp("task=track", "logger=mlflow", "run=run", **environment)
    assert done.returncode == 0, done.stderr
    ((_, name, status, found, keys, tags, files, metrics),) = python(READ_MLFLOW, server.uri)
    assert {int(step): loss for step, loss in found.items()} == pytest.approx(losses(exp.path("run")))
    assert (name, status, keys["optim.lr"], tags["status"]) == ("run", "FINISHED", "0.0005", "completed")
    assert {"config.yaml", "result.json", "env.json"} <= set(files)
    assert metrics["metric"] == pytest.approx(exp.result("run")["metric"])


@needs_clients
@pytest.mark.extended
def test_without_a_server_the_jobs_of_a_sweep_share_a_database_and_a_tag(exp):
    done = exp("-m", *TINY, "logger=mlflow", "seed=1,2", "output_dir=sweep", **with_clients())
    assert done.returncode == 0, done.stdout + done.stderr
    found = python(READ_MLFLOW, f"sqlite:///{exp.path('outputs/mlflow/mlflow.db')}")
    runs = {name: (status, tags["sweep"]) for _, name, status, _, _, tags, _, _ in found}
    assert runs == {"sweep/0": ("FINISHED", "sweep"), "sweep/1": ("FINISHED", "sweep")}
