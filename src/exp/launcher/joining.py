"""The worker of launcher=external: joins the others, agrees with them on one run and one folder, and works.

Run as ``python -m exp.launcher.joining ORDER``.
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

from exp.cores import cores_of_task
from exp.errors import EXIT_CONFIG, EXIT_FAILED
from exp.launcher.processes import die_with_parent, name_process, start_resource_tracker
from exp.launcher.rank import SCRATCH_VARIABLE, RankInfo, make_store, this_host
from exp.preemption import PreemptionFlag
from exp.raised import message_of
from exp.runfolder import RunFolder, read_json, write_json
from exp.worker import work_to_end

__all__ = ["JOINED", "main"]

JOINED = "joined.json"
"""In the private folder of the process: which folder the worker has come to, or why it was refused."""

_MEETING = "meeting.json"
_SEEN_WITHIN_S = 60.0  # an NFS client may keep saying for a while that a new file is not there


def main() -> None:
    """Do what ``sys.argv[1]`` (JSON, of :mod:`exp.launcher.external`) says; the process ends here."""
    order: dict[str, Any] = json.loads(sys.argv[1])
    scratch = os.environ[SCRATCH_VARIABLE]
    die_with_parent(signal.SIGKILL, order["parent"])
    start_resource_tracker()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank, local_world_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    name_process(f"exp-rank{rank}")
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    info = RankInfo(
        rank, local_rank, world_size, local_world_size,
        node_rank=rank // local_world_size,
        restart_count=restarts,
        single_node=world_size == local_world_size,
        own_cores=cores_of_task(),
        preemption_flag=PreemptionFlag(scratch),
    )  # fmt: skip
    joined = Path(scratch, JOINED)
    folder = order["folder"]
    if world_size > 1:
        info.met.append(make_store(info, timedelta(seconds=order["timeout_s"])))
        folder, refused = _agree(info.met[0], rank, world_size, order)
        if refused is not None:
            write_json(joined, {"refused": refused})
            time.sleep(0.5)  # rank 0 may hold the store: the others have to read it
            os._exit(EXIT_CONFIG)
    write_json(joined, {"folder": folder, "restarts": restarts})
    work_to_end(RunFolder(folder), info)


def _agree(store: Any, rank: int, world_size: int, order: dict[str, Any]) -> tuple[str, str | None]:
    """One command, one folder; returns the folder, and what is wrong, the same on every rank.

    Rank 0 compares. Every rank tells it what it was given, and then whether it finds rank 0's folder.
    """
    told = {"host": this_host(), "digest": order["digest"], "overrides": order["overrides"]}
    store.set(f"exp/given/{rank}", json.dumps(told))  # noqa: TID251 - plain strings
    if rank == 0:
        others = [json.loads(store.get(f"exp/given/{other}")) for other in range(1, world_size)]
        wrong = next((_differs(number, other, told) for number, other in enumerate(others, 1) if
                      _differs(number, other, told)), None)  # fmt: skip
        token = f"{os.getpid()}-{time.time_ns()}"
        folder = order["folder"]
        write_json(Path(folder, "logs", _MEETING), {"token": token})
        store.set("exp/folder", json.dumps([folder, token, wrong]))  # noqa: TID251
    folder, token, wrong = json.loads(store.get("exp/folder"))
    if wrong is None:
        store.set(f"exp/seen/{rank}", "yes" if _sees(folder, token) else this_host())
        if rank == 0:
            for other in range(world_size):
                seen = store.get(f"exp/seen/{other}").decode()
                if seen != "yes":
                    wrong = (
                        f"rank {other} ({seen}) does not see rank 0's run folder {folder}; "
                        "set output_dir=<a folder that all nodes share>"
                    )
                    break
            Path(folder, "logs", _MEETING).unlink()
            store.set("exp/go", wrong or "go")
        word = store.get("exp/go").decode()
        wrong = None if word == "go" else word
    return folder, wrong


def _differs(rank: int, other: dict[str, Any], first: dict[str, Any]) -> str | None:
    where = f"rank {rank} ({other['host']}) was given another command than rank 0"
    if other["overrides"] != first["overrides"]:
        mine, theirs = ([each for each in one["overrides"] if each not in two["overrides"]]
                        for one, two in ((first, other), (other, first)))  # fmt: skip
        return f"{where}: {' '.join(theirs) or 'nothing'} instead of {' '.join(mine) or 'nothing'}; give all the same"
    if other["digest"] != first["digest"]:
        return f"{where}: its configuration differs, though not the arguments; have all use the same files and folder"
    return None


def _sees(folder: str, token: str) -> bool:
    deadline = time.monotonic() + _SEEN_WITHIN_S
    while True:
        found = read_json(Path(folder, "logs", _MEETING))
        if found is not None and found["token"] == token:
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)


if __name__ == "__main__":
    try:
        main()
    except Exception as error:  # noqa: BLE001 - it has no log yet: its parent shows what it says here
        sys.stderr.write(f"{type(error).__name__}: {message_of(error)}\n")
        sys.stderr.flush()
        os._exit(EXIT_FAILED)
