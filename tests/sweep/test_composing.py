"""What jobs of a sweep share is composed once: the same text as when Hydra composes each of them alone."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
from hydra import initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import OmegaConf, open_dict

from exp.config.sources import register
from exp.errors import ExpError
from exp.launcher.base import Classes
from exp.launcher.freeze import compose_run, validate_run
from exp.launcher.outcome import Outcome
from exp.sweep.composing import Composer
from exp.sweep.sweep import Sweep

# Jobs that set the same keys, by row: what they set, with %s for their values.
SHAPES = [
    ("seed=%s|optim.lr=%s", "1 1e-3", "2 1", "4 0.5", "3 null", "x 0.5"),  # the last two are refused
    ("data.horizon=%s|model.d_model=%s", "48 32", "24 64"),  # other keys refer to it
    ("name=%s|global_batch_size=%s|plots=true", "first 8", "../up 16"),  # refused: ../up
    ("data.root=%s|name=a", "~/here", "'~/here'"),  # refused: the first
    ("init_from=null|data.name=x${seed}|seed=%s", "3"),
    ("optim=sgd|seed=%s", "1", "2"),
    ("backend=auto|seed=%s", "5", "6"),
    ("hooks=[{type: %s}]|seed=%s", "EMAHook 1", "os.system 2"),  # refused: os.system
    ("backend.env={A: b}|seed=%s", "9"),
    ("+optim.options.eps=%s|seed=%s", "1e-3 1", "1e-2 2"),
    ("schedule.param_scheduler=null|seed=%s", "1"),
    ("experiment=timebridge_etth1|data.horizon=%s|seed=2", "96", "192"),
    ("model.nonesuch=%s|seed=2", "1"),  # refused
    ("batch_size=%s|max_epochs=%s|max_steps=%s", "4 null 3", "8 2 null"),
]
JOBS = [(shape % tuple(values.split())).split("|") for shape, *several in SHAPES for values in several]
SWEEP = ["backend=cpu", "output_dir=here"]


@pytest.mark.extended
def test_every_configuration_is_the_same_as_composed_alone(hydra, tmp_path, monkeypatch):
    loader, master = hydra
    composer = Composer(loader)

    def alone(overrides: list[str]) -> str:
        composed = loader.load_sweep_config(master, overrides)
        HydraConfig.instance().set_config(composed)
        config = copy.deepcopy(composed)
        with open_dict(config):
            del config["hydra"]
        config = compose_run(config, overrides)
        run = validate_run(config, overrides, Classes.of(config), tmp_path / "run")
        return OmegaConf.to_yaml(run.config, resolve=True)

    def shared(overrides: list[str]) -> str:
        prepared = composer.config_for_job(master, overrides, 0)
        run = validate_run(prepared, composer.task_overrides(overrides), Classes.of(prepared), tmp_path / "run")
        return OmegaConf.to_yaml(run.config, resolve=True)

    def outcome(way, overrides: list[str]) -> str:
        try:
            return way(overrides)
        except (ExpError, HydraException) as error:
            return f"{type(error).__name__}: {error}"

    jobs = [[*SWEEP[job[0].startswith("backend=") :], *job] for job in JOBS]
    expected = [outcome(alone, job) for job in jobs]
    composed = []
    load = loader.load_sweep_config
    monkeypatch.setattr(loader, "load_sweep_config", lambda *job: composed.append(job) or load(*job))
    for job, text in zip(jobs, expected):
        assert outcome(shared, job) == text, job
    assert sum(text.partition(":")[0].endswith(("Error", "Exception")) for text in expected) >= 6
    assert len(composed) < len(jobs) - 7, "the others were composed by Hydra"


@pytest.fixture
def hydra(tmp_path, monkeypatch):
    """Hydra's loader of configurations, and the configuration of a whole sweep."""
    monkeypatch.chdir(tmp_path)
    register()
    GlobalHydra.instance().clear()
    with initialize_config_module("exp.conf", version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        master = loader.load_configuration("config", SWEEP, run_mode=RunMode.MULTIRUN)
        HydraConfig.instance().set_config(master)
        assert str(master.output_dir)
        yield loader, master
    GlobalHydra.instance().clear()


@pytest.mark.parametrize(
    ("codes", "code"), [([0, 0], 0), ([0, 75], 75), ([75, 75], 75), ([0, 1], 1), ([1, 75], 1), ([1, 1], 1), ([0, 2], 1)]
)
def test_the_exit_code_of_a_sweep(tmp_path, codes, code):
    lock = SimpleNamespace(check=lambda: None, made=[], release=lambda: None)
    jobs = [SimpleNamespace(outcome=Outcome(each)) for each in codes]
    sweep = SimpleNamespace(lock=lock, jobs=jobs, launched=True, folder=tmp_path, _report=lambda rest: None, error=None)
    assert Sweep.close(sweep, str) == (code, [], None)
