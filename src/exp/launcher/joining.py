"""The worker of launcher=external: it agrees with the others on one run and one folder, and then works as any other.

Run as ``python -m exp.launcher.joining SPEC`` by :mod:`exp.launcher.external`, in torch's variables.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from exp.errors import EXIT_CONFIG, EXIT_FAILED
from exp.launcher.processes import die_with_parent, name_process, start_resource_tracker
from exp.launcher.rank import SCRATCH_VARIABLE, RankInfo, make_store, this_host
from exp.launcher.worker import work_to_end
from exp.runs.files import write_json
from exp.runs.folder import RunFolder
from exp.runs.lock import LOCK, read_holder
from exp.user_code import message_of

__all__ = ["JOINED", "main"]

JOINED = "joined.json"
"""In the private folder of the job: which run folder the worker has come to, or why it was refused."""

_SEEN_WITHIN_S = 60.0  # an NFS client may keep saying for a while that a new file is not there
_READ_WITHIN_S = 0.5


def main() -> None:
    """Do what ``sys.argv[1]`` (JSON) says; the process ends here."""
    spec: dict[str, Any] = json.loads(sys.argv[1])
    die_with_parent(signal.SIGKILL, spec["parent"])
    start_resource_tracker()
    info = RankInfo.from_environment(os.environ, external=True)
    name_process(f"exp-rank{info.rank}")
    joined, folder = Path(os.environ[SCRATCH_VARIABLE], JOINED), spec["folder"]
    if info.world_size > 1:
        info.met.append(make_store(info, timedelta(seconds=spec["timeout_s"])))
        folder, refused = _agree(info.met[0], info, spec)
        if refused is not None:
            write_json(joined, {"refused": refused})
            time.sleep(_READ_WITHIN_S)  # rank 0 may hold the store: the others have to read it
            os._exit(EXIT_CONFIG)
    write_json(joined, {"folder": folder, "restarts": info.restart_count})
    work_to_end(RunFolder(folder), info)


def _agree(store: Any, info: RankInfo, spec: dict[str, Any]) -> tuple[str, str | None]:
    """One command, one folder; returns the folder, and what is wrong, the same on every rank.

    Every rank tells rank 0 what it was given, and then whether it sees rank 0's folder.
    """
    store.set(f"exp/given/{info.rank}", json.dumps({**spec, "host": this_host()}))  # noqa: TID251 - plain strings
    if info.rank == 0:
        others = [json.loads(store.get(f"exp/given/{other}")) for other in range(1, info.world_size)]
        found = [_difference(number, other, spec) for number, other in enumerate(others, 1)]
        holder = read_holder(Path(spec["folder"], LOCK))
        wrong = next(filter(None, found), None)
        store.set("exp/folder", json.dumps([spec["folder"], holder and holder.secret, wrong]))  # noqa: TID251
    folder, secret, wrong = json.loads(store.get("exp/folder"))
    if wrong is not None:
        return folder, wrong
    store.set(f"exp/seen/{info.rank}", "yes" if _sees(folder, secret) else this_host())
    if info.rank == 0:
        seen = [store.get(f"exp/seen/{other}").decode() for other in range(info.world_size)]
        blind = next((f"rank {rank} ({host})" for rank, host in enumerate(seen) if host != "yes"), None)
        text = f"{blind} does not see rank 0's run folder {folder}; set output_dir=<a folder that all nodes share>"
        store.set("exp/go", text if blind else "")
    return folder, store.get("exp/go").decode() or None


def _difference(rank: int, other: dict[str, Any], first: dict[str, Any]) -> str | None:
    where = f"rank {rank} ({other['host']}) was given another command than rank 0"
    if other["overrides"] != first["overrides"]:
        mine, theirs = ([each for each in one["overrides"] if each not in two["overrides"]]
                        for one, two in ((first, other), (other, first)))  # fmt: skip
        return f"{where}: {' '.join(theirs) or 'nothing'} instead of {' '.join(mine) or 'nothing'}; give all the same"
    if other["digest"] != first["digest"]:
        return f"{where}: its configuration differs, though not the arguments; have all use the same files and folder"
    return None


def _sees(folder: str, secret: str) -> bool:
    """Whether this rank sees the folder that rank 0's process has locked."""
    deadline = time.monotonic() + _SEEN_WITHIN_S
    while True:
        holder = read_holder(Path(folder, LOCK))
        if holder is not None and holder.secret == secret:
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)


if __name__ == "__main__":
    try:
        main()
    except Exception as error:  # noqa: BLE001 - it has no log yet: its parent shows what it prints
        sys.stderr.write(f"{type(error).__name__}: {message_of(error)}\n")
        sys.stderr.flush()
        os._exit(EXIT_FAILED)
