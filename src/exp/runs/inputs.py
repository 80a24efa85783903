"""What a run was made of besides its configuration: the user's code, exp's own changes, packages, and data files.

``inputs.json`` has it, so that ``task=why`` can say how two runs differ. Imports no torch.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any, Mapping

import exp

_MAX_CHARS = 200_000  # of a module or a diff; of a larger one only the digest is kept
_MAX_MODULES = 200
_NOT_THE_USERS = ("__main__", "__mp_main__", "exp", "hydra_plugins")


def describe_inputs(data_files: Mapping[str, Any] | None) -> dict[str, Any]:
    """Content of ``inputs.json``: what a process that has begun its work has loaded.

    Args:
        data_files: fingerprint of the data files (:mod:`exp.data.fingerprint`); None: not known.

    Returns:
        ``data_files``; ``exp_changes``, the difference of exp's checkout from its commit, as git writes it; ``modules``
        of the user by name, each with ``file``, ``revision`` of its git checkout, ``digest`` and ``source``; and the
        versions of all installed ``packages``.
    """
    checkout = Path(exp.__file__).parent
    return {
        "data_files": data_files,
        # Of what computes; paths are relative to exp's package.
        "exp_changes": (git_output(checkout, "diff", "HEAD", "--", ".", "../../backends") or "")[:_MAX_CHARS],
        "modules": _user_modules(),
        "packages": _packages(),
    }


def git_revision(folder: Path) -> str | None:
    """The commit of ``folder``, with ``-dirty`` if files differ from it; None outside a git checkout."""
    return git_output(folder, "describe", "--always", "--dirty", "--abbrev=40")


def git_output(folder: Path, *arguments: str) -> str | None:
    """What a command of git prints in ``folder``; None: nothing, or it fails, as outside a checkout."""
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _packages() -> dict[str, str]:
    """Versions of the installed packages, by the names of their folders: reading the files of each takes a second."""
    folders = (folder for entry in reversed(sys.path) for folder in Path(entry).glob("*.dist-info"))
    names = (folder.name[: -len(".dist-info")].rpartition("-") for folder in folders)
    return {name.replace("_", "-"): version for name, _, version in names}


def _user_modules() -> dict[str, dict[str, Any]]:
    """The imported modules that belong neither to exp nor to Python, and are not installed."""
    folders = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    installed = {Path(folder).resolve() for folder in folders}
    prefixes = tuple(f"{folder}/" for folder in {*folders, *map(str, installed)})  # a quick answer for most
    modules: dict[str, dict[str, Any]] = {}
    revisions: dict[Path, str | None] = {}
    for name, module in sorted(sys.modules.items()):
        file = str(getattr(module, "__file__", None))
        if not file.endswith(".py") or name.partition(".")[0] in _NOT_THE_USERS or file.startswith(prefixes):
            continue
        if len(modules) == _MAX_MODULES:
            break
        path = Path(file).resolve()
        try:
            content = None if installed.intersection(path.parents) else path.read_bytes()
        except OSError:  # it was deleted, or is in an archive
            content = None
        if content is not None:
            if path.parent not in revisions:
                revisions[path.parent] = git_revision(path.parent)
            text = content.decode("utf-8", "replace")
            modules[name] = {
                "file": str(path),
                "revision": revisions[path.parent],
                "digest": hashlib.sha256(content).hexdigest(),
                "source": text if len(text) <= _MAX_CHARS else None,
            }
    return modules
