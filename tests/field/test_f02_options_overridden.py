"""F2: the wrapper options in the config file were overridden by the training script.

Two sources of truth: the file said one thing, the script passed another, and nobody saw which one had won. It was the
users' own script, so there is nothing of it to reproduce here.

With exp there is one composed configuration: it is written to the run folder, what it says is what the wrapper gets,
and the device arguments, which are not the user's to give, are refused.
"""

from __future__ import annotations

from tests.conftest import TINY


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
    done = exp(*TINY, "nproc=2", *options, "hooks=[{type: mine.Look}]", "output_dir=run", **mine)
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert (exp.folder / f"seen{rank}.json").read_text() == "[true, 7340032]"
    config = (exp.path("run") / "config.yaml").read_text()
    assert "bucket_cap_mb: 7" in config
    assert "find_unused_parameters: true" in config


def test_device_arguments_have_one_source(exp):
    for option in ("+wrapper.device_ids=[0]", "+wrapper.output_device=0"):
        done = exp(*TINY, "nproc=2", option)
        assert done.returncode == 2
        assert "comes from the backend alone; remove it" in done.stderr.splitlines()[0]
