"""F12: ROCm needed HIP_VISIBLE_DEVICES, MIOPEN_DISABLE_CACHE=1 and MIOPEN_SYSTEM_DB_PATH="" in every script.

With exp the backend's file holds its environment, and workers get it before torch is imported, which is when device
libraries read it. There is nothing to reproduce without the hardware.
"""

from __future__ import annotations

import json

import pytest
from omegaconf import OmegaConf

from exp.backends_registry import create_backend
from tests.conftest import TINY

pytestmark = pytest.mark.slow  # nothing in it depends on the version of torch


def test_the_file_of_the_backend_holds_it(tmp_path, monkeypatch):
    from hydra import compose, initialize_config_module

    from exp.config import structures

    structures.register()
    monkeypatch.setenv("EXP_SCRATCH", str(tmp_path))  # a job's private folder: a cache by card needs a card
    with initialize_config_module("exp.conf", version_base="1.3"):
        config = compose("config", ["backend=rocm", "output_dir=x"]).backend
    environment = create_backend(OmegaConf.to_container(config)).worker_env(0, 8, single_node=True)
    assert environment["MIOPEN_SYSTEM_DB_PATH"] == ""
    # The cache was turned off because processes that share one break it; now each card has one.
    assert {"MIOPEN_USER_DB_PATH", "MIOPEN_CUSTOM_CACHE_DIR"} <= environment.keys()


def test_workers_get_it_before_torch_is_imported(exp, library):
    mine = library("""
        import sys
        from exp.backends.cpu import CpuBackend
        class Early(CpuBackend):
            def worker_env(self, *place, **more):
                early = "no" if "torch" in sys.modules else "yes"
                return {"BEFORE_TORCH": early, **super().worker_env(*place, **more)}
            def set_device(self, local_rank):
                import os
                open(f"seen{local_rank}", "w").write(os.environ["BEFORE_TORCH"] + os.environ["MY_LIBRARY"])
                return super().set_device(local_rank)
            def close(self):
                import os
                open(f"closed{os.environ['LOCAL_RANK']}", "w").close()
    """)
    (exp.folder / "conf" / "backend").mkdir(parents=True)
    (exp.folder / "conf" / "backend" / "early.yaml").write_text(
        "_target_: mine.Early\nname: early\nenv:\n  MY_LIBRARY: quiet\n"
    )
    settings = [setting for setting in TINY if setting != "backend=cpu"]
    settings = [*settings, "nproc=2", "output_dir=run"]
    done = exp("--config-dir", "conf", "backend=early", *settings, fresh=True, **mine)
    assert done.returncode == 0, done.stderr
    assert [(exp.folder / f"seen{rank}").read_text() for rank in (0, 1)] == ["yesquiet", "yesquiet"]
    assert (exp.folder / "closed0").exists()  # the last that a worker does
    assert (exp.folder / "closed1").exists()
    assert json.loads((exp.path("run") / "env.json").read_text())["backend_env"]["MY_LIBRARY"] == "quiet"


def test_what_the_user_has_exported_wins(exp):
    done = exp(*TINY, "+backend.env.MY_LIBRARY=quiet", "output_dir=run", MY_LIBRARY="loud")
    assert done.returncode == 0, done.stderr
    assert json.loads((exp.path("run") / "env.json").read_text())["backend_env"]["MY_LIBRARY"] == "loud"
