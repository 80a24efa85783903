from __future__ import annotations

import functools
import json
import multiprocessing.forkserver
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any, Sequence

import pytest

# A shell that puts the tests into the background (`pytest &` in a script) has them, and every process under them,
# ignore SIGINT; then no test of Ctrl-C could mean anything.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # of nohup, likewise
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# No test is for a real card: those who have one wait for the CPU, and find the same.
os.environ["CUDA_VISIBLE_DEVICES"] = ""

# A training of the default experiment that takes seconds: few short windows, a tiny model.
TINY = [
    "backend=cpu", "data.lookback=96", "model.d_model=16", "model.d_ff=16", "model.num_heads=2", "global_batch_size=32",
    "max_epochs=1", "max_steps=4", "log_every=2", "plots=false",  # matplotlib takes longer than the training
]  # fmt: skip

# The lane of a test follows from where it stands and what it uses. `make test` leaves out what is `extended`. The old
# Python and torch run the others, except those of CURRENT, which depend on neither: they read the source, compose,
# compare records of runs, or end processes; of these, and of the extended ones, they run what is marked `legacy`.
# Files that mostly wait or take long come first.
EXTENDED = ("tests/simulators/", "tests/slurm/", "tests/docs/", "examples/")
LEGACY = ("tests/simulators/legacy/",)
PROCESSES = {"exp", "ranks", "cluster", "run_exp", "Forked", "subprocess"}
FIRST = ("tests/slurm/", "tests/docs/", "examples/", "tests/behaviour/")
CURRENT = re.compile(
    r"tests/(backends|config|draw|launcher|report|sweep)/"
    r"|tests/test_(foreign|hub|layers|no_vendor_names|private_interfaces|runfolder|runlock|strings)\.py"
    r"|tests/behaviour/test_(cards|changes|digests|end|failures|field|folders|grid|hydra|kept|launch|locks|machine|nodes"
    r"|options|own_code|own_mistakes|preempt|read|refusals|reuse|schedule|trackers|traps|trust)\.py"
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = [*FIRST, ""]
    items.sort(key=lambda item: next(place for place, start in enumerate(order) if item.nodeid.startswith(start)))
    for item in items:
        uses = PROCESSES & {*item.fixturenames, *vars(item.module)}
        if item.nodeid.startswith(EXTENDED) or (uses and not item.nodeid.startswith("tests/behaviour/")):
            item.add_marker("extended")
        is_quick = item.get_closest_marker("extended") is None
        if item.nodeid.startswith(LEGACY) or (is_quick and not CURRENT.match(item.nodeid)):
            item.add_marker("legacy")


def read_strictly(text: str) -> Any:
    """The JSON value in ``text``; Python alone would read infinity and nan, which are none."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON: {text}")

    return json.loads(text, parse_constant=refuse)


def clean_environment(**extra: str) -> dict[str, str]:
    """The environment of a child: this one's, less what would make it someone's rank; one thread per process."""
    drop = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCH_DISTRIBUTED_BACKEND")
    environment = {key: value for key, value in os.environ.items() if key not in drop}
    return {**environment, "OMP_NUM_THREADS": "1", **extra}


def free_port() -> int:
    """A port of the loopback interface that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def write_files(page: Path, folder: Path, **names: Sequence[str]) -> None:
    """The files whose contents stand in a page: its blocks of a language, in order, under these names.

    Args:
        page: has as many blocks of each language as there are names.
        folder: where they go.
        **names: paths by language: ``python=["my_task.py"]``.
    """
    text = page.read_text()
    for language, paths in names.items():
        blocks = re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)
        assert len(blocks) == len(paths), f"{page.name} has {len(blocks)} blocks of {language}"
        for path, block in zip(paths, blocks):
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(block)


class Forked:
    """``python -m exp`` in the background, with the ways of a :class:`subprocess.Popen`.

    Not in a new interpreter, but in a process forked from one that has imported torch and MMEngine: that saves most of
    the seconds of a short run. What it inherits in /proc is the template's; what it starts is as ever. A test of what
    is imported when, or of how processes begin, has to be ``fresh``.
    """

    def __init__(
        self, folder: Path, *arguments: str, new_session: bool = False, script: str | None = None, **extra: str
    ) -> None:
        """With a ``script``, ``python -c script`` instead."""
        self.args = ["exp" if script is None else "-c", *arguments]
        self._place = tempfile.TemporaryDirectory()
        self._files = [Path(self._place.name, name) for name in ("stdout", "stderr")]
        given = (arguments, str(folder), clean_environment(**extra), *map(str, self._files), new_session, script)
        self._process = _template().Process(target=_be_exp, args=given)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self._process.join(timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0, *(file.read_bytes() for file in self._files))
        output, errors = (file.read_text(encoding="utf-8") for file in self._files)
        return output, errors


def run_exp(
    folder: Path, *arguments: str, timeout: float = 280, fresh: bool = False, **extra: str
) -> subprocess.CompletedProcess[str]:
    """``python -m exp`` in ``folder``, forked; ``fresh``, or an environment that the loader reads, begin anew."""
    if fresh or any(name.startswith("LD_") for name in extra):
        command = [sys.executable, "-m", "exp", *arguments]
        return subprocess.run(command, cwd=folder, env=clean_environment(**extra), capture_output=True, text=True,
                              timeout=timeout, check=False)  # fmt: skip
    process = Forked(folder, *arguments, **extra)
    try:
        said = process.communicate(timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    assert process.returncode is not None
    return subprocess.CompletedProcess(process.args, process.returncode, *said)


def start_script(folder: Path, script: str, *arguments: str, fresh: bool = False, **extra: str) -> Any:
    """``python -c script`` in ``folder``, forked, or ``fresh`` in an interpreter of its own."""
    if not fresh:
        return Forked(folder, *arguments, script=script, **extra)
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.Popen(command, cwd=folder, env=clean_environment(**extra), text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip


def ended_well(workers: list[Any]) -> list[tuple[str, str]]:
    """Output and errors of processes that all end with 0."""
    try:
        said = [worker.communicate(timeout=280) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    for worker, each in zip(workers, said):
        assert worker.returncode == 0, each
    return said


@functools.lru_cache(maxsize=None)
def _template():
    context = multiprocessing.get_context("forkserver")
    modules = ["tests.conftest", "pandas", "exp.worker.preload", "exp.cli", "tests.warm"]
    context.set_forkserver_preload(modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")  # read when torch is loaded
        multiprocessing.forkserver.ensure_running()
    return context


def _be_exp(arguments, folder, environment, stdout, stderr, new_session, script) -> None:
    if new_session:
        os.setsid()
    for name, descriptor in ((stdout, 1), (stderr, 2)):
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, descriptor)
        os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["exp" if script is None else "-c", *arguments]
    # As the interpreter does it: with -c the folder, and then what the variable names.
    here = [] if script is None else [folder]
    sys.path[:0] = [*here, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    if script is None:
        runpy.run_module("exp", run_name="__main__")
    else:
        exec(script, {"__name__": "__main__"})


@pytest.fixture
def exp(tmp_path):
    """Runs ``python -m exp`` in an empty folder; ``exp.result(name)`` reads a run's result."""

    class Exp:
        folder = tmp_path

        def __call__(self, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
            return run_exp(tmp_path, *arguments, **options)

        def train(self, name: str, *arguments: str, **extra: str) -> dict:
            done = self(*TINY, f"output_dir={name}", *arguments, **extra)
            assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
            return self.result(name)

        def result(self, name: str) -> dict:
            return read_strictly((tmp_path / name / "result.json").read_text())

        def losses(self, name: str) -> dict[int, float]:
            lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
            records = [read_strictly(line) for line in lines]
            return {record["step"]: record["loss"] for record in records if record["split"] == "train"}

        def path(self, name: str) -> Path:
            return tmp_path / name

    return Exp()


# What every rank begins with: its place, a backend by name, and the engine's way of joining the process group.
BEGIN = """
import json, sys
from datetime import timedelta
rank, world_size, name, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
from exp.hardware.registry import create_backend
backend = create_backend({"_target_": name, "name": name})
def join():
    import torch.distributed as dist
    from exp.distributed import Distributed
    store = dist.FileStore(folder + "/store", world_size)
    return Distributed.create(backend, store, rank, world_size, timedelta(seconds=240))
"""


@pytest.fixture
def ranks(tmp_path):
    """Runs a script in real processes, one per rank; gives what each printed last, as JSON, by rank."""

    def run(script: str, world_size: int = 1, backend: str = "cpu", before: str = "", **environment: str) -> list:
        folder = tempfile.mkdtemp(dir=tmp_path)
        own = [(str(rank), str(world_size), backend, folder) for rank in range(world_size)]
        fresh = bool(environment)  # what decides how torch is loaded, or whether it is
        program = before + BEGIN + textwrap.dedent(script)
        workers = [start_script(Path.cwd(), program, *arguments, fresh=fresh, **environment) for arguments in own]
        return [json.loads(output.splitlines()[-1]) for output, _ in ended_well(workers)]

    return run
