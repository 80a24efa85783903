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


def test_help_fits_a_screen_and_lists_every_choice(exp):
    done = exp("--help")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.rstrip().splitlines()
    assert len(lines) <= 55
    assert max(map(len, lines)) <= 80
    text = " ".join(done.stdout.split())
    for words in ("timebridge_etth1", "auto cpu cuda gcu", "auto external local", "mlflow none", "init_from"):
        assert words in text, words
    shown = exp("--cfg", "job", "nproc=3", "experiment=timebridge_weather")
    assert all(line in shown.stdout for line in ("nproc: 3\n", "name: timebridge_weather\n"))


@pytest.mark.parametrize("flags", [["--help"], ["nprox=2"]])
def test_answers_without_importing_torch(tmp_path, flags):
    script = (
        "import sys\nfrom exp.cli import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "loaded = {'torch', 'mmengine', 'pandas', 'matplotlib'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    done = subprocess.run([sys.executable, "-c", script, *flags], cwd=tmp_path, env=clean_environment(), check=False,
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_a_default_run_is_quiet_and_leaves_its_records(exp):
    done = exp(*TINY, "output_dir=run")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert len(done.stdout.splitlines()) <= 15, done.stdout
    for words in ("rank 0/1  local_rank 0  cpu", "MSE", "MAE", "published", "samples/s", "run"):
        assert words in done.stdout, done.stdout
    result = exp.result("run")
    assert result["global_batch_size"] == 32
    assert result["metric"] == result["metrics"]["mse"]
    assert result["samples_per_second"] > 0
    assert result["error"] is None
    assert "${" not in (exp.path("run") / "config.yaml").read_text(), "the frozen configuration must be resolved"


@pytest.mark.parametrize(
    "arguments",
    [[*TINY, "launcher=local"], ["launcher=submitit", "launcher.dry_run=true"], ["--help"]],
)
def test_a_run_whose_reader_has_gone_goes_on(exp, tmp_path, arguments):
    reader, writer = os.pipe()
    os.close(reader)  # as after ``| head``
    try:
        done = subprocess.run(
            [sys.executable, "-m", "exp", "backend=cpu", *arguments, "output_dir=run"], cwd=tmp_path, text=True,
            env=clean_environment(), check=False, stdout=writer, stderr=subprocess.PIPE,
        )  # fmt: skip
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")
    if "launcher=local" in arguments:
        assert exp.result("run")["status"] == "completed"


def test_stale_variables_cause_a_warning_and_nothing_else(exp):
    stale = {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "LOCAL_RANK": "3"}
    done = exp(*TINY, "output_dir=run", **stale)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("warning: ignoring ")
    assert len(done.stderr.splitlines()) == 1
    assert "rank 0/1" in done.stdout


def test_shell_completion_and_info_work(exp):
    command = [str(Path(sys.executable).with_name("exp")), "-sc", "query=bash"]
    environment = clean_environment(COMP_LINE="exp backend=c", COMP_POINT="13")
    done = subprocess.run(command, env=environment, cwd=exp.folder, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["backend=cpu", "backend=cuda"]
    shown = exp("--info", "searchpath")
    assert shown.returncode == 0
    assert "exp.conf" in shown.stdout


def test_two_nodes_make_one_run(exp):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    nodes = ["launcher.nnodes=2", f"launcher.rdzv_endpoint=127.0.0.1:{port}", "output_dir=run", "launcher.timeout_s=60"]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "exp", *TINY, *nodes],
            cwd=exp.folder,
            env=clean_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=280)
        assert process.returncode == 0, errors
    assert exp.result("run")["world_size"] == 2


def in_bash(folder: Path, command: str) -> subprocess.CompletedProcess[str]:
    """A command line as a user types it, with this environment's python and exp first on the path."""
    environment = clean_environment(PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    return subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=280
    )


def interrupt_when_saved(process: Forked, folder: Path, number: int) -> tuple[str, str]:
    """Send the signal once there is a new checkpoint; returns what was printed."""
    before = set(folder.glob("checkpoints/step_*.pth"))
    deadline = time.monotonic() + 240
    while not set(folder.glob("checkpoints/step_*.pth")) - before:
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(number)
    printed, errors = process.communicate(timeout=120)
    assert process.returncode == 128 + number
    assert f"interrupted by {signal.Signals(number).name}" in errors.splitlines()[0]
    return printed, errors


def test_an_interrupted_local_run_says_so_and_can_be_continued(exp):
    settings = [*TINY, "max_steps=400", "checkpoint.every_steps=1", "output_dir=run"]
    for number in (signal.SIGTERM, signal.SIGINT):
        process = Forked(exp.folder, *settings, "resume=auto")
        _, errors = interrupt_when_saved(process, exp.path("run"), number)
        assert errors.startswith("error: ")
        result = exp.result("run")
        assert result["error"]["type"] == "Interrupted"
        saved = max(int(path.stem[5:]) for path in exp.path("run/checkpoints").glob("step_*.pth"))
        assert result["steps"] >= saved > 0
    advice = errors.partition("to continue from the last checkpoint: ")[2].strip()
    assert advice.endswith("output_dir=run resume=auto")
    done = in_bash(exp.folder, f"{advice} max_steps=100")  # as copied
    assert done.returncode == 0, done.stderr
    assert exp.result("run")["resumed_from"] is not None
    assert exp(*settings).returncode == 2  # it is completed


def test_an_interrupt_ends_the_whole_sweep(exp):
    settings = [
        *TINY,
        "max_steps=400",
        "checkpoint.every_steps=1",
        "output_dir=sweep",
        "seed=1,2",
        "sweep.parallel_jobs=1",
    ]
    for number, more in ((signal.SIGTERM, []), (signal.SIGINT, ["sweep.resume=true"])):
        process = Forked(exp.folder, "-m", *settings, *more)
        printed, errors = interrupt_when_saved(process, exp.path("sweep/0"), number)
        assert not exp.path("sweep/1/result.json").exists()
        assert exp.result("sweep/0")["error"]["type"] == "Interrupted"
        assert "resume=auto" not in errors
    advice = printed.partition("to do the rest: ")[2].splitlines()[0]
    done = in_bash(exp.folder, advice.replace("max_steps=400", "max_steps=40"))
    assert done.returncode == 0, done.stderr
    results = [json.loads(file.read_text()) for file in exp.path("sweep").glob("*/result.json")]
    assert sum(result["status"] == "completed" for result in results) == 2
