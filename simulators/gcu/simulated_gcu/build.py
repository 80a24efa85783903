"""Compiles the native code of a simulated card once for each torch version, and keeps it in the user's cache."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any, Callable, Iterator

import simulated_gcu

__all__ = ["BuildError", "cached_extension", "cached_library", "extension", "library", "load"]

_FLAGS = ["-O1", "-g0", "-w"]  # fast code is not needed: torch's own kernels compute


class BuildError(RuntimeError):
    """The native code cannot be compiled here; the first line of the message says what is missing."""


def cache_folder() -> Path:
    """``SIM_GCU_CACHE``, else ``$XDG_CACHE_HOME/simulated-gcu``, else ``~/.cache/simulated-gcu``."""
    chosen = os.environ.get("SIM_GCU_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "simulated-gcu"


def _sources() -> list[Path]:
    folder = simulated_gcu.path() / "csrc"
    return sorted(path for path in folder.rglob("*") if path.suffix in (".cpp", ".h"))


def _table() -> Path:
    """The operator table of the vendor's plug-in; the legacy generation has none."""
    return simulated_gcu.path() / "operators.txt"


def cached_extension() -> Path:
    """Path of the compiled extension, which may not exist yet; it differs by torch, Python and source text."""
    digest = hashlib.sha256(" ".join(_FLAGS).encode())
    for source in filter(Path.is_file, (*_sources(), _table())):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    tag = f"{simulated_gcu.generation()}-torch{metadata.version('torch')}-{sys.implementation.cache_tag}"
    return cache_folder() / f"{tag}-{digest.hexdigest()[:12]}" / "_C.so"


def extension() -> Path:
    """Path of the compiled extension; compile it if it is not in the cache. Safe in several processes at once.

    Raises:
        BuildError: there is no compiler, the cache cannot be written, or the compilation failed.
    """
    library()
    return _made(cached_extension(), _compile)


def cached_library() -> Path | None:
    """Path of ``libefml.so.1``, which may not exist yet; None: this generation has no such library."""
    source = simulated_gcu.path() / "efml.c"
    if not source.is_file():
        return None
    text = source.read_bytes() + (simulated_gcu.path() / "csrc" / "state.h").read_bytes()
    return cache_folder() / f"efml-{hashlib.sha256(text).hexdigest()[:12]}" / "libefml.so.1"


def library() -> Path | None:
    """Path of the management library; compile it if it is not in the cache. None: the legacy generation has none.

    Raises:
        BuildError: see :func:`extension`.
    """
    target = cached_library()
    return None if target is None else _made(target, _compile_library)


def _made(target: Path, make: Callable[[Path, str], None]) -> Path:
    """Make ``target`` if it does not exist, and return it. Safe in several processes at once."""
    if target.is_file():
        return target
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None or shutil.which(compiler) is None:
        raise BuildError(
            "the simulated card is compiled once and needs a C++ compiler: looked for "
            f"{compiler or 'CXX, c++, g++ and clang++'} and found none; install one (apt-get install g++)"
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.parent / "lock"):
            if not target.is_file():  # another process may have been faster
                make(target, compiler)
    except OSError as error:
        raise BuildError(f"cannot write {target.parent} ({error.strerror}); set SIM_GCU_CACHE") from error
    return target


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(target: Path, compiler: str) -> None:
    version = metadata.version("torch")
    print(f"compiling the simulated card for torch {version}, once; half a minute or so", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        order = [sys.executable, "-m", "simulated_gcu.build", folder, *map(str, _sources())]
        environment = {
            **os.environ,
            "CXX": compiler,
            "MAX_JOBS": os.environ.get("MAX_JOBS", "2"),
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
            # ninja is a script in the interpreter's folder, which may not be on PATH.
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
            # simulated_gcu may be on sys.path, but not on PYTHONPATH.
            "PYTHONPATH": os.pathsep.join([str(Path(simulated_gcu.__file__).parents[1]), *_inherited_path()]),
        }
        done = subprocess.run(order, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            log = target.parent / "build.log"
            log.write_text(done.stdout + done.stderr)
            last = [line for line in done.stdout.splitlines() + done.stderr.splitlines() if "error" in line.lower()]
            raise BuildError(
                f"compiling the simulated card for torch {version} failed: {last[0].strip() if last else ''}\n"
                f"  the whole output: {log}"
            )
        (Path(folder) / "_C.so").replace(target)


def _compile_library(target: Path, compiler: str) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder, target.name)
        order = [compiler, "-x", "c", "-shared", "-fPIC", "-O1", f"-Wl,-soname,{target.name}", "-o", str(made)]
        source = simulated_gcu.path() / "efml.c"
        done = subprocess.run([*order, str(source)], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise BuildError(f"compiling {source} failed: {done.stderr.strip()}")
        made.replace(target)


def _inherited_path() -> list[str]:
    return [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]


def _compile_here(folder: str, sources: list[str]) -> None:
    from torch.utils import cpp_extension

    headers = simulated_gcu.path() / "csrc"
    if _table().is_file():
        text = _table().read_text(encoding="ascii")
        Path(folder, "operators.inc").write_text(f'constexpr char kOperators[] = R"({text})";\n', encoding="ascii")
    cpp_extension.load(
        "_C",
        [source for source in sources if source.endswith(".cpp")],
        build_directory=folder,
        extra_include_paths=[str(headers), str(headers / "stub"), folder],
        extra_cflags=_FLAGS,
        is_python_module=False,
        verbose=True,
    )


def load(name: str) -> Any:
    """Import the compiled extension as the module ``name``, whose last part must be ``_C``.

    Raises:
        BuildError: see :func:`extension`.
    """
    loader = importlib.machinery.ExtensionFileLoader(name, str(extension()))
    spec = importlib.util.spec_from_file_location(name, loader.path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    sys.modules[name] = module
    return module


if __name__ == "__main__":
    _compile_here(sys.argv[1], sys.argv[2:])
