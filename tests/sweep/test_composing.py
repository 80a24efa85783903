"""What jobs of a sweep share is composed once: the same text as when Hydra composes each of them alone."""

from __future__ import annotations

import contextlib
import copy

import pytest
from hydra import initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import OmegaConf, open_dict

from exp.config import choices, structures
from exp.errors import ExpError
from exp.freezing import complete, freeze
from exp.sweep.composing import Composer

JOBS = [
    ["seed=1", "optim.lr=1e-3"],
    ["seed=2", "optim.lr=1"],
    ["seed=3", "optim.lr=null"],  # refused
    ["seed=4", "optim.lr=0.5"],
    ["seed=x", "optim.lr=0.5"],  # refused
    ["data.horizon=48", "model.d_model=32"],  # other keys refer to it
    ["data.horizon=24", "model.d_model=64"],
    ["name=first", "global_batch_size=8", "plots=false"],
    ["name='a b'", "global_batch_size=16", "plots=true"],
    ["name=../up", "global_batch_size=16", "plots=true"],  # refused
    ["data.root=~/here", "name=a"],  # refused
    ["data.root='~/here'", "name=a"],
    ["init_from=null", "data.name=x${seed}", "seed=3"],
    ["optim=sgd", "seed=1"],
    ["optim=sgd", "seed=2"],
    ["backend=auto", "seed=5"],
    ["backend=auto", "seed=6"],
    ["hooks=[{type: EMAHook}]", "seed=1"],
    ["hooks=[{type: os.system}]", "seed=2"],  # refused
    ["backend.env={A: b}", "seed=9"],
    ["+optim.options.eps=1e-3", "seed=1"],
    ["+optim.options.eps=1e-2", "seed=2"],
    ["schedule.param_scheduler=null", "seed=1"],
    ["experiment=timebridge_etth1", "data.horizon=96", "seed=2"],
    ["experiment=timebridge_etth1", "data.horizon=192", "seed=2"],
    ["model.nonesuch=1", "seed=2"],  # refused
    ["batch_size=4", "max_epochs=null", "max_steps=3"],
    ["batch_size=8", "max_epochs=2", "max_steps=null"],
]


@pytest.fixture
def hydra(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    structures.register()
    choices.register_resolvers()
    GlobalHydra.instance().clear()
    with initialize_config_module("exp.conf", version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        first = ["backend=cpu", "output_dir=here"]
        master = loader.load_configuration("config", first, run_mode=RunMode.MULTIRUN)
        HydraConfig.instance().set_config(master)
        assert str(master.output_dir)
        yield loader, master, [[*first[job[0].startswith("backend=") :], *job] for job in JOBS]
    GlobalHydra.instance().clear()


@pytest.mark.extended
def test_every_configuration_is_the_same_as_composed_alone(hydra, tmp_path, monkeypatch):
    loader, master, jobs = hydra

    def alone(overrides: list[str]) -> str:
        composed = loader.load_sweep_config(master, overrides)
        HydraConfig.instance().set_config(composed)
        config = copy.deepcopy(composed)
        with open_dict(config):
            del config["hydra"]
        run = freeze(config, overrides, tmp_path / "run")
        return OmegaConf.to_yaml(run.config, resolve=True)

    composer = Composer(loader)

    def shared(overrides: list[str]) -> str:
        run = complete(composer.prepared(master, overrides, 0), composer.task_overrides(overrides), tmp_path / "run")
        return OmegaConf.to_yaml(run.config, resolve=True)

    def outcome(way, overrides: list[str]) -> str:
        try:
            return way(overrides)
        except (ExpError, HydraException) as error:
            return f"{type(error).__name__}: {error}"

    expected = [outcome(alone, job) for job in jobs]
    for job in jobs:
        with contextlib.suppress(HydraException):
            composer.load_sweep_config(master, job)  # as the sweeper does, before any is run
    composed = []
    load = loader.load_sweep_config
    monkeypatch.setattr(loader, "load_sweep_config", lambda *job: composed.append(job) or load(*job))
    for job, text in zip(jobs, expected):
        assert outcome(shared, job) == text, job
    kinds = [text.partition(":")[0] for text in expected]
    assert sum(kind.endswith(("Error", "Exception")) for kind in kinds) >= 6
    assert len(composed) < len(jobs) - 12, "the others were composed by Hydra"
