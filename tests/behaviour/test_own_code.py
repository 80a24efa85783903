"""Code from outside the repository: the pages' own listings, a folder with a module and YAML, installed packages."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import exp as api
from tests.behaviour.conftest import ROOT, STEADY, TINY, losses, result, snapshot
from tests.conftest import clean_environment

OIL = ["--config-dir", "my_conf", "experiment=oil", "backend=cpu", "max_steps=4", "log_every=1", "plots=false"]


@pytest.fixture
def oil(exp, page):
    """docs/tutorial/add-an-experiment.md, done to the letter."""
    yaml = [f"my_conf/{group}.yaml" for group in ("experiment/my_net", "data/oil", "model/mlp", "experiment/oil")]
    page("add-an-experiment", python=["my_net.py", "my_lightning.py", "my_hf.py", "my_experiment.py"], yaml=yaml)
    shutil.copy(str(ROOT / "data" / "ett" / "ETTh1.csv"), str(exp.folder))

    def run(*arguments, code=0):
        done = exp(*arguments)
        assert done.returncode == code, done.stdout + done.stderr
        return done

    return run


@pytest.mark.legacy
def test_an_experiment_of_ones_own_is_trained_resumed_and_evaluated_on_any_number_of_ranks(oil, exp):
    oil(*OIL, "output_dir=one", "checkpoint.every_steps=2")
    oil(*OIL, "output_dir=half", "resume=one/checkpoints/step_00000002.pth")
    assert exp.result("half")["metrics"] == exp.result("one")["metrics"]
    before = snapshot(exp.path("one"))
    oil("--config-dir", "my_conf", "task=eval", "init_from=one", "backend=cpu", "output_dir=tested", "nproc=2")
    assert exp.result("tested")["metrics"] == pytest.approx(exp.result("one")["metrics"], rel=1e-6)
    assert list(exp.result("tested")["metrics"]) == ["error", "squared_error"]
    assert snapshot(exp.path("one")) == before


def test_a_network_and_a_loss_of_ones_own_train_without_a_class_of_exps(oil, exp):
    quick = ["backend=cpu", "data.lookback=96", "max_steps=2", "log_every=1", "plots=false"]
    own = ["--config-dir", "my_conf", "experiment=my_net", *quick]
    oil(*own, "output_dir=one")
    two = "model.losses=[{_target_: torch.nn.L1Loss, weight: 0.7}, {_target_: my_net.worst_series, weight: 0.3}]"
    oil(*own, "model.loss={}", two, "output_dir=both")
    assert [exp.result(name)["warnings"] for name in ("one", "both")] == [[], []]


@pytest.mark.extended
def test_modules_in_the_manner_of_other_libraries_train(oil, exp):
    quick = ["backend=cpu", "max_steps=2", "log_every=1", "plots=false"]
    lightning = ["experiment=plain", "data=etth1", "data.lookback=96", "model=custom"]
    oil(*lightning, "model._target_=my_lightning.Forecaster", *quick, "output_dir=lightning")
    assert exp.result("lightning")["warnings"] == []
    oil(
        "experiment=plain", "data=eurosat", "data.size=32", "model.module._target_=my_hf.TinyForImageClassification",
        "model.inputs={pixel_values: image}", "model.output=logits", *quick,
        "model.loss._target_=torch.nn.CrossEntropyLoss", "output_dir=hf",
    )  # fmt: skip
    assert exp.result("hf")["warnings"] == []


@pytest.mark.extended
def test_it_is_predicted_swept_compared_and_tried_out_in_one_batch(oil, exp):
    numpy = pytest.importorskip("numpy")
    oil(*OIL, "output_dir=one", "nproc=2")
    oil("--config-dir", "my_conf", "task=predict", "init_from=one", "backend=cpu", "output_dir=said", "nproc=2")
    shares = [numpy.load(exp.path("said") / "predictions" / f"rank{rank}.npz") for rank in (0, 1)]
    assert sorted(number for share in shares for number in share["index"]) == list(range(3484))
    oil("-m", *OIL, "model.hidden=4,8", "metric=squared_error", "output_dir=sweep", "sweep.plots=false")
    assert exp.result("sweep/0")["metric_name"] == "squared_error"
    oil(*OIL, "task=parity", "reference=cpu", "steps=2", "output_dir=parity")
    oil("--config-dir", "my_conf", "experiment=oil", "backend=cpu", "debug=one_batch", "output_dir=short")
    assert exp.result("short")["steps"] == 2
    assert (exp.path("short") / "plots" / "curves.png").is_file()


@pytest.mark.extended
def test_overfit_reports_whether_the_model_can_learn(oil, exp):
    code = exp.folder / "my_experiment.py"
    text = code.read_text()
    assert "nn.Dropout(0.1), " in text
    code.write_text(text.replace("nn.Dropout(0.1), ", ""))
    overfit = ["--config-dir", "my_conf", "experiment=oil", "backend=cpu", "debug=overfit", "plots=false"]
    assert "the model can learn" in oil(*overfit, "optim.lr=1e-2", "output_dir=learned").stdout
    told = exp.result("learned")
    assert told["steps"] < 500
    assert told["measured_on"] == "test (training batches)"
    assert "that is not near zero" in oil(*overfit, "optim.lr=1e-9", "max_steps=4", "output_dir=not").stdout


def test_what_is_wrong_with_it_is_said_before_the_first_step(oil, exp):
    code = exp.folder / "my_experiment.py"
    text = code.read_text()
    for old, new, named in (
        ("(Data):", ":", "my_experiment.TransformerLoad"),
        ("return AbsoluteError()", "return Rows([])", "Rows"),
        ("self.table[number]", "self.tables[number]", "AttributeError"),
        ('return {"loss": nn', 'return {"mse": nn', "loss"),
    ):
        assert old in text
        code.write_text(text.replace(old, new))
        done = exp(*OIL, "output_dir=run")
        assert done.returncode in (1, 2), (new, done.stdout, done.stderr)
        assert named in done.stderr.splitlines()[0], (new, done.stderr)
        assert not (exp.path("run") / "checkpoints").exists()
        shutil.rmtree(exp.path("run"), ignore_errors=True)
    code.write_text(text)
    for words, named in ((["model.hiden=3"], "'model.hidden'"), (["data.fil=x"], "'data.file'")):
        done = exp(*OIL, *words)
        assert done.returncode == 2
        assert named in done.stderr.splitlines()[0]
    exp.path("my_conf/model/mlp.yaml").write_text("_target_: my_experiment.Mlp\n")
    exp.path("my_conf/data/oil.yaml").write_text(
        "_target_: my_experiment.TransformerLoad\nname: oil\nfile: ETTh1.csv\n"
    )
    # Arguments that the YAML files do not list:
    done = exp(*OIL, "data.eval_batch_size=7", "model.hidden=3", "output_dir=run")
    assert done.returncode == 0, done.stderr
    written = exp.path("run/config.yaml").read_text()
    assert "  eval_batch_size: 7\n" in written
    assert "  hidden: 3\n" in written


def test_a_task_a_launcher_and_a_wrapper_of_ones_own(exp, page, trained):
    page(
        "add-a-task",
        python=["my_task.py", "my_launcher.py", "my_wrapper.py"],
        yaml=[f"my_conf/{file}.yaml" for file in ("task/noise", "launcher/nice", "wrapper/half")],
    )
    own = ["launcher=nice", "launcher.niceness=3", "wrapper=half", "wrapper.options.bucket_cap_mb=50"]
    done = exp("--config-dir", "my_conf", *STEADY, *own, "nproc=2", "output_dir=run")
    assert done.returncode == 0, done.stderr
    assert exp.result("run")["wrapper"] == "half"
    assert losses(exp.path("run")) == pytest.approx(losses(trained("steady")), rel=1e-2)
    assert losses(exp.path("run")) != losses(trained("steady"))  # gradients of 16 bits lead elsewhere
    assert "niceness: 3" in (exp.path("run") / "config.yaml").read_text()

    noise = ["--config-dir", "my_conf", "task=noise", f"init_from={trained('forecast')}", "backend=cpu"]
    done = exp(*noise, "task.levels=[0.0,5.0]", "nproc=2", "output_dir=noise")
    assert done.returncode == 0, done.stderr
    found = exp.result("noise")["metrics"]
    assert found["mse_at_0"] == pytest.approx(result(trained("forecast"))["metrics"]["mse"], rel=1e-6)
    assert found["mse_at_5"] > found["mse_at_0"]
    for words, named in ((["task.levels=[-1.0]"], "task.levels"), (["task.kay=x"], "task.key")):
        done = exp(*noise, *words, "output_dir=refused")
        assert done.returncode == 2
        assert named in done.stderr.splitlines()[0]
    assert not exp.path("refused").exists()


def test_a_card_of_another_vendor_is_one_file_and_one_yaml(exp, page):
    page("add-a-backend", python=["lib/acme_backend.py", "lib/my_vendors.py"], yaml=["my_conf/backend/acme.yaml"])
    run = ["--config-dir", "my_conf", "backend=acme", *(word for word in TINY if word != "backend=cpu")]
    lib = {"PYTHONPATH": str(exp.folder / "lib")}
    done = exp(*run, "nproc=2", "output_dir=run", **lib)
    assert done.returncode == 0, done.stderr
    assert (exp.result("run")["backend"], exp.result("run")["world_size"]) == ("acme", 2)
    assert '"ACME_LOG": "quiet"' in (exp.path("run") / "env.json").read_text()
    code = exp.folder / "lib" / "acme_backend.py"
    code.write_text(code.read_text().replace("shared_device=True", "shared_device=False"))
    for words, number, named in ((["nproc=5"], 3, "4"), (["nproc=2"], 1, "ranks 0 and 1")):
        done = exp(*run, *words, "output_dir=refused", **lib)
        assert done.returncode == number
        assert named in done.stderr.splitlines()[0]


def install(site: Path, name: str, text: str) -> None:
    """A package with a plugin, in a folder for PYTHONPATH."""
    (site / f"{name}-1.0.dist-info").mkdir(parents=True)
    (site / f"{name}-1.0.dist-info" / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (site / f"{name}-1.0.dist-info" / "entry_points.txt").write_text(f"[exp.plugins]\n{name} = {name}:plugin\n")
    (site / f"{name}.py").write_text(text)


def test_a_plugin_that_cannot_be_used_is_a_warning(exp):
    for name, text in (("raising", "raise RuntimeError('broken\\nhere')"), ("lacking", ""), ("other", "plugin = 3")):
        install(exp.path("site"), name, text)
    done = exp("backend=cpu", "--cfg", "job", PYTHONPATH=str(exp.path("site")))
    assert done.returncode == 0, done.stderr
    assert "name: timebridge_small" in done.stdout
    warnings = done.stderr.splitlines()
    assert [line[:9] for line in warnings] == ["warning: "] * 3
    for name, line in zip(("lacking", "other", "raising"), warnings):
        assert f"'{name}'" in line


def test_workers_run_the_package_that_the_command_runs(tmp_path):
    """Whatever is called exp in the current folder, and if PYTHONPATH is relative to it."""
    (tmp_path / "exp").mkdir()
    (tmp_path / "exp" / "__init__.py").write_text("open('executed', 'w').close()\n")
    shutil.copytree(Path(api.__file__).parent, tmp_path / "lib" / "exp", ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "lib" / "exp" / "session.py").open("a") as file:
        file.write(f"\nopen({str(tmp_path / 'copy')!r}, 'w').close()\n")
    command = [str(Path(sys.executable).with_name("exp")), *STEADY, "nproc=2", "output_dir=run"]
    environment = clean_environment(PYTHONPATH="lib")
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "copy").is_file()
    assert not (tmp_path / "executed").exists()


HEAD = """
from torch import nn

from exp.vision.heads import Head


class Tall(Head):
    def __init__(self, info, num_classes, channels=8):
        super().__init__(info, num_classes)
        self.layers = nn.Sequential(
            nn.Conv2d(sum(info.channels), channels, 1), nn.ReLU(), nn.Conv2d(channels, num_classes, 1)
        )

    def forward(self, maps, cls=None):
        return self.layers(maps[0])
"""
EXPERIMENT = """
# @package _global_
defaults:
  - dinov3_dubai
  - override /model/head: tall
  - _self_
name: tall
"""


def test_a_segmentation_head_of_ones_own_is_one_module_and_one_yaml(exp):
    (exp.folder / "my_heads.py").write_text(HEAD)
    (exp.folder / "my_conf" / "experiment").mkdir(parents=True)
    (exp.folder / "my_conf" / "model" / "head").mkdir(parents=True)
    (exp.folder / "my_conf" / "experiment" / "tall.yaml").write_text(EXPERIMENT.lstrip())
    (exp.folder / "my_conf" / "model" / "head" / "tall.yaml").write_text("_target_: my_heads.Tall\nchannels: 5\n")
    small = [f"model.backbone.{key}" for key in ("embed_dim=16", "depth=1", "num_heads=1")]
    tiles = ["experiment=tall", *small, "max_steps=1", "max_epochs=null", "val_every=1", "data.num_workers=0"]
    common = ["--config-dir", "my_conf", "backend=cpu", "plots=false"]
    done = exp(*common, *tiles, "output_dir=run")
    assert done.returncode == 0, done.stderr
    done = exp(*common, "task=eval", "init_from=run", "output_dir=tested")
    assert done.returncode == 0, done.stderr
    assert exp.result("tested")["metrics"] == pytest.approx(exp.result("run")["metrics"], rel=1e-6)
    done = exp(
        *common, *tiles, "model.head={_target_: torch.nn.Linear, in_features: 1, out_features: 1}", "output_dir=no"
    )
    assert done.returncode == 2
    assert "model.head" in done.stderr.splitlines()[0]
