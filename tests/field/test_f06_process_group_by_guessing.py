"""F6: scripts tried eccl, then gloo, then nccl, and reported "eccl" while they ran gloo.

With exp the process group is chosen once, before anything else, by all ranks together, from backend and configuration.
A fallback happens only where it is allowed, is announced on every rank, and is recorded in the result.
"""

from __future__ import annotations

from tests.field.conftest import CARDS, JOIN
from tests.simulators import needs_current_card


def test_stock_script_guesses(stock):
    script = (
        JOIN
        + """
for name in ("eccl", "gloo", "nccl"):
    try:
        join(name)
        break
    except Exception:
        continue
print("training over eccl")
print(dist.get_backend())
"""
    )
    (ended,) = stock(script)
    assert ended.returncode == 0, ended.printed
    assert ended.printed.split("\n")[-3:-1] == ["training over eccl", "gloo"]


def missing_on_rank_1(exp, library) -> tuple[list[str], dict[str, str]]:
    """A machine on which one rank's collectives are not there."""
    mine = library("""
        import os
        from exp.backends.gcu import GcuBackend
        class Halved(GcuBackend):
            def collectives_missing(self):
                return "libeccl.so: cannot open shared object file" if os.environ["RANK"] == "1" else None
    """)
    (exp.folder / "conf" / "backend").mkdir(parents=True, exist_ok=True)
    (exp.folder / "conf" / "backend" / "halved.yaml").write_text("_target_: mine.Halved\nname: gcu\n")
    settings = [setting for setting in CARDS if not setting.startswith("backend=")]
    return ["--config-dir", "conf", "backend=halved", *settings, "nproc=2", "output_dir=run"], mine


@needs_current_card
def test_exp_refuses_without_permission_and_names_the_choices(exp, library):
    arguments, mine = missing_on_rank_1(exp, library)
    done = exp(*arguments, **mine)
    assert done.returncode == 3
    first = done.stderr.splitlines()[0]
    assert "cannot be made: rank 1: libeccl.so: cannot open shared object file" in first
    assert "backend.allow_fallback=true, or backend.process_group=gloo" in first


@needs_current_card
def test_exp_falls_back_where_it_may_on_all_ranks_and_says_so(exp, library):
    arguments, mine = missing_on_rank_1(exp, library)
    done = exp(*arguments, "backend.allow_fallback=true", **mine)
    assert done.returncode == 0, done.stderr
    assert "FALLBACK on every rank: gloo, staged through the CPU instead of cpu:gloo,gcu:eccl" in done.stdout
    result = exp.result("run")
    assert result["process_group"] == "gloo, staged through the CPU"
    assert result["fallback"]["reason"] == "rank 1: libeccl.so: cannot open shared object file"
    for rank in (0, 1):
        assert "fallback: gloo, staged" in (exp.path("run") / "logs" / f"rank{rank}.log").read_text()
