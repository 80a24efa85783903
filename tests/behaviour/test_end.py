"""However a run ends, the cause comes first, and nothing of it stays on the machine."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Iterable

import pytest

from tests.behaviour.conftest import LONG, STEADY, family, gone, has_steps, result, wait_for

TWO = [*LONG, "nproc=2", "data.num_workers=1", "output_dir=run"]


def shared_memory(pids: Iterable[int]) -> set[str]:
    """Files of shared memory that these processes hold, and that have a name."""
    maps = "".join(Path(f"/proc/{pid}/maps").read_text() for pid in pids)
    return {word for word in maps.split() if word.startswith("/dev/shm/") and Path(word).exists()}


@pytest.mark.parametrize("how", [
    "SIGTERM", "kill the parent", pytest.param("kill the agent", marks=pytest.mark.extended)
])  # fmt: skip
def test_nothing_is_left_behind(exp, start, how):
    (exp.folder / "tmp").mkdir()
    process = start(*TWO, TMPDIR=str(exp.folder / "tmp"))
    wait_for(has_steps(exp.path("run")), process)
    everybody = family(process.pid)
    assert len(everybody) >= 4  # the command, torch's agent, two ranks
    held = shared_memory(everybody)
    assert held
    if how == "kill the parent":
        process.kill()
    elif how == "kill the agent":
        os.kill(next(pid for pid, name in everybody.items() if name == "exp-agent"), signal.SIGKILL)
    else:
        process.send_signal(signal.Signals[how])
    output, errors = process.communicate(timeout=120)
    code = {"kill the parent": -signal.SIGKILL, "kill the agent": 1}.get(how)
    assert process.returncode == (128 + signal.Signals[how] if code is None else code), output + errors
    if code is None:
        assert errors.startswith(f"error: interrupted by {how}")
    left = lambda: [path for path in (exp.folder / "tmp").iterdir() if not path.name.startswith("torchinductor")]  # noqa: E731
    wait_for(lambda: gone(everybody) and not left(), seconds=60)
    assert [name for name in held if Path(name).exists()] == []


@pytest.mark.legacy
def test_a_killed_rank_is_named_and_with_a_restart_the_run_is_the_straight_one(exp, start, trained):
    settings = [*STEADY, "nproc=2", "checkpoint.every_steps=1", "output_dir=run"]
    run = exp.path("run")
    for restarts in (0, 1):
        process = start(*settings, "max_steps=30", f"launcher.max_restarts={restarts}", *["overwrite=true"] * restarts)
        wait_for(has_steps(run, 3), process)
        (rank1,) = [pid for pid, name in family(process.pid).items() if name == "exp-rank1"]
        os.kill(rank1, signal.SIGKILL)
        output, errors = process.communicate(timeout=280)
        if restarts == 0:
            assert process.returncode == 1, output
            assert errors.startswith("error: rank 1 (local_rank 1"), errors
            assert "SIGKILL" in errors.splitlines()[0]
            assert result(run)["error"]["rank"] == 1
            (run / "metrics.jsonl").unlink()
    assert process.returncode == 0, errors
    told = result(run)
    assert (told["restarts"], told["steps"], told["status"]) == (1, 30, "completed")
    straight = exp.train("straight", *STEADY, "max_steps=30")
    assert told["metrics"] == pytest.approx(straight["metrics"], rel=1e-4)


def test_what_a_user_s_class_raises_is_named_with_rank_class_and_line(exp, page):
    yaml = [f"my_conf/{group}.yaml" for group in ("experiment/my_net", "data/oil", "model/mlp", "experiment/oil")]
    page("add-an-experiment", python=["my_net.py", "my_lightning.py", "my_hf.py", "my_experiment.py"], yaml=yaml)
    (exp.folder / "mine.py").write_text(
        "import os\nfrom my_experiment import Mlp\n\n\nclass Fails(Mlp):\n    def forward(self, *args, **kwargs):\n"
        "        if os.environ['RANK'] == '1' and self.training:\n            raise ValueError('enough')\n"
        "        return super().forward(*args, **kwargs)\n"
    )
    (exp.folder / "ETTh1.csv").symlink_to(Path(__file__).parents[2] / "data" / "ett" / "ETTh1.csv")
    done = exp("--config-dir", "my_conf", "experiment=oil", "backend=cpu", "nproc=2", "plots=false",
               "model._target_=mine.Fails", "output_dir=run")  # fmt: skip
    assert done.returncode == 1, done.stdout
    first = done.stderr.splitlines()[0]
    assert first.startswith("error: rank 1 ")
    for words in ("ValueError", "enough", "mine.py", "line 8"):
        assert words in first
    assert exp.result("run")["status"] == "failed"
    assert exp.result("run")["error"]["rank"] == 1
    assert "Traceback" in (exp.path("run") / "logs" / "rank1.log").read_text()
