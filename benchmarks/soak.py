"""Short runs one after another, most of them killed in some way: counts what they leave behind on the machine.

    python benchmarks/soak.py [runs]

Counts processes, temporary files, shared memory and the launching process's open descriptors after each run. Runs are
launched from this process, except those whose parent is killed.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Iterable

from omegaconf import OmegaConf

from exp.config.compose import load
from exp.launcher.base import Classes, FrozenRun
from exp.launcher.torchrun import TorchrunLauncher
from exp.runs.folder import RunFolder

SETTINGS = [
    "backend=cpu", "data.lookback=96", "model.d_model=16", "model.d_ff=16", "model.num_heads=2", "global_batch_size=32",
    "log_every=2", "plots=false", "nproc=2", "data.num_workers=1",
]  # fmt: skip
LONG = ["max_steps=100000", "max_epochs=100000", "val_every=100000"]
KINDS = ["normal", "kill -9 of a rank", "kill -9 of the agent", "SIGTERM", "kill -9 of the parent"]


def marked(mark: str) -> dict[int, str]:
    """Living processes that have ``mark`` in their environment: pid and name."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (entry / "environ").read_bytes() and int(entry.name) != os.getpid():
                found[int(entry.name)] = (entry / "comm").read_text().strip() + (entry / "cmdline").read_text()
        except OSError:
            continue
    return found


def shared_memory(pids: Iterable[int]) -> set[Path]:
    """Files of /dev/shm that the processes have mapped, such as named semaphores."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{pid}/maps").read_text()
            found |= {Path(name) for name in re.findall(r"(/dev/shm/\S+)$", maps, re.MULTILINE)}
    return found


def interfere(kind: str, metrics: Path, mark: str, shared: set[Path]) -> None:
    """Wait for the first steps, record shared memory, then interfere in the way of ``kind``."""
    while not metrics.is_file() or '"train"' not in metrics.read_text():
        time.sleep(0.1)
        shared |= shared_memory(marked(mark))
    if kind == "normal":
        return
    if kind == "SIGTERM":
        os.kill(os.getpid(), signal.SIGTERM)
        return
    name = {"kill -9 of a rank": "exp-rank1", "kill -9 of the agent": "exp-agent"}.get(kind, "-m\0exp\0")
    os.kill(next(pid for pid, said in marked(mark).items() if name in said), signal.SIGKILL)


def prepare(place: Path) -> None:
    """Make an ordinary run, whose configuration the other runs use."""
    first = place / "first"
    command = [sys.executable, "-m", "exp", *SETTINGS, "max_steps=4", "max_epochs=1", f"output_dir={first}"]
    subprocess.run(command, check=True, capture_output=True)
    config = OmegaConf.load(first / "config.yaml")
    OmegaConf.save(config, place / "short.yaml")
    config.max_steps = config.max_epochs = config.val_every = 100000
    OmegaConf.save(config, place / "long.yaml")


def run(kind: str, place: Path, number: int, mark: str, shared: set[Path]) -> int:
    """Make one run; returns its exit code."""
    folder = RunFolder(place / f"run{number}")
    threading.Thread(target=interfere, args=(kind, folder.metrics, mark, shared), daemon=True).start()
    if kind == "kill -9 of the parent":
        command = [sys.executable, "-m", "exp", *SETTINGS, *LONG, f"output_dir={folder.path}"]
        return subprocess.run(command, check=False, capture_output=True).returncode
    folder.create()
    shutil.copy(place / ("short.yaml" if kind == "normal" else "long.yaml"), folder.config)
    config = load(folder.config)
    return TorchrunLauncher().launch(FrozenRun(config, [], folder, Classes.of(config))).exit_code


def entries(folder: str) -> set[str]:
    """Names in a folder."""
    return set(os.listdir(folder))  # noqa: PTH208 - of /proc, whose entries vanish meanwhile


def main() -> None:
    """Run the soak and print a line for each run."""
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        place, temporary = Path(folder), Path(folder, "tmp")
        temporary.mkdir()
        os.environ["TMPDIR"] = tempfile.tempdir = str(temporary)
        mark = os.environ["SOAK_MARK"] = folder
        prepare(place)
        for number in range(runs):
            kind = KINDS[number % len(KINDS)]
            descriptors = len(entries("/proc/self/fd"))
            shared: set[Path] = set()
            begun = time.monotonic()
            code = run(kind, place, number, mark, shared)
            ended = time.monotonic()
            while marked(mark) and time.monotonic() < ended + 15:
                time.sleep(0.1)
            gone = time.monotonic() - ended
            left = [
                f"processes {len(marked(mark))}",
                f"temporary files {sum(not name.startswith('torchinductor') for name in entries(str(temporary)))}",
                f"of {len(shared)} in /dev/shm {sum(path.exists() for path in shared)}",
                f"descriptors {len(entries('/proc/self/fd')) - descriptors:+d}",
            ]
            took = f"{ended - begun:5.1f} s, gone after {gone:.1f} s"
            print(f"{number + 1:3} {kind:22} code {code:4} {took}; left: {', '.join(left)}", flush=True)


if __name__ == "__main__":
    main()
