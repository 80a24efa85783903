"""F2: the wrapper options in the config file were overridden, and nobody saw which ones had won.

There were two sources of truth. MMEngine has them built in: `find_unused_parameters` counts at the top of the file, or
in `model_wrapper_cfg`, and where there is a `model_wrapper_cfg` the other one is dropped without a word. Scripts that
passed options of their own made it three.

With exp there is one composed configuration: it is written to the run folder, what it says is what the wrapper gets,
and the device arguments, which are not the user's to give, are refused.
"""

from __future__ import annotations

import json

import pytest

from tests.conftest import TINY
from tests.field.conftest import JOIN


def test_stock_mmengine_drops_an_option_without_a_word(stock):
    script = """
        from mmengine.model import BaseModel
        from mmengine.runner import Runner
        join("gloo")
        class Model(BaseModel):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(2, 2)
            def forward(self, inputs, mode="tensor"):
                return {"loss": self.layer(inputs).sum()}
        config = {
            "find_unused_parameters": True,
            "model_wrapper_cfg": {"type": "MMDistributedDataParallel", "device_ids": None},
        }
        runner = Runner(model=Model(), work_dir="work", launcher="pytorch", log_level="ERROR", cfg=config)
        print("asked for", runner.cfg.find_unused_parameters, "and got", runner.model.find_unused_parameters)
    """
    (ended,) = stock(script, begin=JOIN)
    assert ended.last == "asked for True and got False"


@pytest.mark.slow
def test_the_wrapper_gets_what_the_config_says(exp, library):
    mine = library("""
        import json
        from mmengine.hooks import Hook
        class Look(Hook):
            def before_train(self, runner):
                found = [runner.model.find_unused_parameters, runner.model.bucket_bytes_cap]
                open(f"seen{runner.rank}.json", "w").write(json.dumps(found))
    """)
    options = ["wrapper.find_unused_parameters=true", "wrapper.bucket_cap_mb=7"]
    done = exp(
        *TINY,
        "max_steps=1",
        "nproc=2",
        *options,
        "hooks=[{type: mine.Look}]",
        "plugins=[mine]",
        "output_dir=run",
        **mine,
    )
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert json.loads((exp.folder / f"seen{rank}.json").read_text()) == [True, 7 * 2**20]
    config = (exp.path("run") / "config.yaml").read_text()
    assert "bucket_cap_mb: 7" in config
    assert "find_unused_parameters: true" in config


def test_device_arguments_have_one_source(exp):
    for option in ("+wrapper.device_ids=[0]", "+wrapper.output_device=0"):
        done = exp(*TINY, "nproc=2", option)
        assert done.returncode == 2
        assert "comes from the backend alone; remove it" in done.stderr.splitlines()[0]
