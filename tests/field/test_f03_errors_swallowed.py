"""F3: a try/except around the wrapping let training go on unwrapped, each rank alone.

The wrapping failed (F1), the script printed the error and went on; eight models were trained, each on an eighth of the
data, and the one that was saved was as good as that.

With exp no error is swallowed: it stops all ranks, and the rank and the cause come first. Nor can several ranks be told
to train without a wrapper.
"""

from __future__ import annotations

import pytest

from tests.conftest import TINY
from tests.field.conftest import JOIN


@pytest.mark.slow
def test_stock_script_trains_each_rank_alone(stock):
    script = """
        join("gloo")
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        try:
            model = nn.parallel.DistributedDataParallel(model, device_ids=[0])
        except Exception as error:
            print("wrapping failed:", type(error).__name__)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.full((1, 2), rank + 1.0)).sum().backward()
        optimizer.step()
        print("weights", next(model.parameters()).tolist())
        dist.destroy_process_group()
    """
    first, second = stock(script, world_size=2, begin=JOIN)
    assert first.returncode == second.returncode == 0  # as if all were well
    assert "wrapping failed: ValueError" in first.printed
    weights = [line for ended in (first, second) for line in ended.printed.splitlines() if line.startswith("weights")]
    assert weights[0] != weights[1]


@pytest.mark.slow
def test_exp_stops_all_ranks_and_names_the_first(exp, library):
    mine = library("""
        import os
        from exp.forecasting.timebridge import TimeBridge
        class Fails(TimeBridge):
            def forward(self, *arguments, **options):
                if os.environ["RANK"] == "1":
                    raise ValueError("this rank has had enough")
                return super().forward(*arguments, **options)
    """)
    done = exp(*TINY, "nproc=2", "model._target_=mine.Fails", "output_dir=run", **mine)
    assert done.returncode == 1
    first = done.stderr.splitlines()[0]
    assert first.startswith("error: rank 1 (local_rank 1, ")
    assert " failed: model: mine.Fails.forward raises ValueError: this rank has had enough (mine.py, line " in first
    assert exp.result("run")["status"] == "failed"
    assert exp.result("run")["error"]["rank"] == 1


@pytest.mark.slow
def test_exp_refuses_several_ranks_without_a_wrapper(exp):
    done = exp(*TINY, "nproc=2", "wrapper=none")
    assert done.returncode == 2
    assert "would train 2 models that never meet" in done.stderr.splitlines()[0]
