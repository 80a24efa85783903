"""Spare processes, for what a run in a test starts by ``python -m``: each would import torch for seconds.

A run is forked from a template that has imported it (:class:`tests.conftest.Forked`). Before it begins it forks some
that wait; each becomes one of the processes that the run starts, and has nothing of what the run did meanwhile. What
/proc says of its environment and command line is made to be as if it had been started by itself: jobs are ended by it.
"""

from __future__ import annotations

import ctypes
import multiprocessing.forkserver
import multiprocessing.process
import multiprocessing.reduction
import multiprocessing.resource_tracker
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOM = "EXP_TEST_ROOM"
"""Environment variable of the template that makes room for the environment of others."""

SWEEP_JOBS = 8
"""Spare processes of a sweep; what comes after these is started as ever."""


def prepare(arguments: tuple[str, ...]) -> None:
    """Fork as many as a run with these arguments may start; in those this does not return, but raises their end."""
    several = any("," in argument or argument in ("-m", "--multirun") for argument in arguments)
    ranks = [argument for argument in arguments if argument.startswith("nproc=")]
    count = SWEEP_JOBS if several else int(ranks[-1:] not in ([], ["nproc=1"]))
    if count == 0:
        return
    from exp.launcher.start import start_modules_by

    spares = [_Spare() for _ in range(count)]

    def give(module: str, *rest: str, environment: dict[str, str], stderr: Any, stdout: Any) -> Any:
        # A plug-in has to be there when torch is loaded.
        if not spares or environment.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "0") != "0":
            return None
        return spares.pop().become(module, rest, environment, stdout, stderr)

    start_modules_by(give)


class _Spare:
    """A process that waits to be one; then with the ways of a :class:`subprocess.Popen`."""

    def __init__(self) -> None:
        self.args: list[str] = []
        self.returncode: int | None = None
        self._ours, theirs = socket.socketpair()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            self._ours.close()
            _wait(theirs)
        theirs.close()

    def become(self, module: str, arguments: tuple[str, ...], environment: dict[str, str], stdout: Any, stderr: Any):
        self.args = [sys.executable, "-m", module, *arguments]
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        order = (module, arguments, dict(environment), str(Path.cwd()), mask)
        with Path(os.devnull).open("rb") as nothing, self._ours:
            files = [nothing.fileno(), 1 if stdout is None else stdout.fileno(), stderr.fileno()]
            multiprocessing.reduction.sendfds(self._ours, files)
            self._ours.sendall(pickle.dumps(order))
        return self

    def poll(self) -> int | None:
        return self._fetch(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int:
        if timeout is None:
            code = self._fetch(0)
            assert code is not None
            return code
        deadline = time.monotonic() + timeout
        while self._fetch(os.WNOHANG) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout)
            time.sleep(0.01)
        assert self.returncode is not None
        return self.returncode

    def _fetch(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _wait(theirs: socket.socket) -> None:
    try:
        files = multiprocessing.reduction.recvfds(theirs, 3)
        with theirs.makefile("rb") as stream:
            module, arguments, environment, folder, mask = pickle.loads(stream.read())
    except (EOFError, RuntimeError):
        os._exit(0)  # the run has ended
    os.setsid()
    for descriptor, file in enumerate(files):
        os.dup2(file, descriptor)
    os.closerange(3, max(int(entry.name) for entry in Path("/proc/self/fd").iterdir()) + 1)
    # What multiprocessing has from the template: this process has been started by nobody of its kind.
    tracker: Any = multiprocessing.resource_tracker._resource_tracker
    tracker._fd = tracker._pid = None
    server: Any = multiprocessing.forkserver._forkserver
    server._forkserver_address = server._forkserver_alive_fd = server._inherited_fds = None
    multiprocessing.process._parent_process = None
    os.chdir(folder)
    if module == "exp.launcher.job":
        prepare(("nproc=2",))
    os.environ.clear()
    os.environ.update(environment)
    show(environment, [sys.executable, "-m", module, *arguments])
    sys.argv = [module, *arguments]
    sys.path[:0] = [folder, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    sys.exit(0)


def show(environment: dict[str, str], command: list[str]) -> None:
    """Write environment and command line to where /proc has them from; what comes too late in them is left out."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    arguments, arguments_end, variables, variables_end = map(int, fields[45:49])
    # What tells processes apart comes first.
    pairs = sorted(environment.items(), key=lambda pair: not pair[0].startswith(("EXP_", "TEST_")))
    parts = [(arguments, arguments_end, command), (variables, variables_end, [f"{k}={v}" for k, v in pairs])]
    for start, end, texts in parts:
        room = end - start
        data = b"".join(os.fsencode(text) + b"\0" for text in texts)[: room - 1]
        ctypes.memmove(start, data.ljust(room, b"\0"), room)
