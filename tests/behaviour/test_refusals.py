"""Exit codes: what cannot be is refused in one line that names the key or file, and leaves no folder."""

from __future__ import annotations

import json
import socket

import pytest

from tests.behaviour.conftest import FORECAST, one_by_one, result

REFUSED = [
    (["nprox=2"], 2, "'nproc'"),
    (["+foo=1"], 2, "'foo'"),
    (["+model.foo=1"], 2, "'model.foo'"),
    (["model.d_modle=64"], 2, "'model.d_model'"),
    (["nproc=two"], 2, "nproc=two"),
    (["backend=cudaa"], 2, "'backend=cuda'"),
    (["precision=fp16"], 2, "precision=fp16"),
    (["wrapper=none", "nproc=2"], 2, "wrapper=none"),
    (["nproc=2", "global_batch_size=33"], 2, "32 or 34"),
    (["launcher._target_=exp.launcher.local.Outcome"], 2, "launcher._target_"),
    (["model._target_=exp.forecasting.timebridge.model.TimeBrige"], 2, "'TimeBridge'"),
    (["data.root=/nowhere"], 2, "/nowhere"),
    (["data=csv"], 2, "data.channels, data.file, data.name"),
    (["model=dinov3_scenes"], 2, "experiment=dinov3_eurosat"),
    (["experiment=dinov3_dubai", "data=segmentation", "data.name=mine", "data.root=.", "data.palette={road: 6E1234}"],
     2, "'data.palette={road: \"6E1234\"}'"),
    (["resume=typo"], 2, "resume=typo"),
    (["task=eval"], 2, "init_from"),
    (["task=eval", "init_from=outputs/typo"], 2, "init_from=outputs/typo"),
    (["task=eval", "init_from=empty"], 2, "init_from=empty"),
    (["init_from=table.csv"], 2, "init_from=table.csv"),
    (["resume=table.csv"], 2, "resume=table.csv"),
    (["task=list"], 2, "task=list"),
    (["data=csv", "data.name=x", "data.file=table.csv", "data.root=.", "data.channels=1"], 2, "take a smaller window"),
    (["task=predict", "init_from=typo", "experiment=dinov3_loveda", "model.backbone.size=tiny"], 2, "init_from=typo"),
    (["experiment=dinov3_dubai", "task=predict", "task.intervals=[0.8]", "init_from=w.pth"], 2, "task.intervals"),
    (["experiment=dinov3_dubai", "model.size=vits16"], 2, "'model.backbone.size=vits16'"),
    (["experiment=dinov3_dubai", "model.out_indices=[1]"], 2, "'model.backbone.out_indices=[1]'"),
    (["experiment=dinov3_dubai", "model.head=upernet"], 2, "model/head=upernet"),
    (["experiment=dinov3_dubai", "model.head={_target_: exp.vision.heads.Fcn, norms: batch}"], 2, "'model.head.norm'"),
    (["experiment=dinov3_dubai", "model.losses=[{_target_: exp.vision.losses.Focal, gama: 1}]"], 2, "losses[0].gamma"),
    (["logger.requires=[nonesuch]"], 3, "nonesuch"),
]  # fmt: skip
VARIANTS = [
    (["+optim.foo=1"], 2, "'optim.foo'"),
    (["plots.format=pdf"], 2, "'figures.format'"),
    (["seed.x=1"], 2, "'seed.x'"),
    (["model=dinov3_scenes", "model.d_model=16"], 2, "model.d_model"),
    (["data.inputs=OT"], 2, "data.inputs=[OT]"),
    (["model.d_model=wide"], 2, "d_model"),
    (["experiment=timebridge_etth"], 2, "'experiment=timebridge_etth"),
    (["precision=fp8"], 2, "precision=fp8"),
    (["wrapper.kind=dp"], 2, "wrapper.kind=dp"),
    (["+wrapper.device_ids=[0]"], 2, "wrapper.device_ids"),
    (["nproc=0"], 2, "nproc=0"),
    (["nproc=["], 2, "nproc=["),
    (["launcher=local", "nproc=2"], 2, "nproc=2"),
    (["launcher={nnodes: 2, foo: 3}"], 2, "'launcher.foo'"),
    (["launcher.nnodes=2", "launcher.rdzv_endpoint=127.0.0.1:1"], 2, "output_dir"),
    (["launcher._target_=exp.launcher.local.LocalLauncer"], 2, "'LocalLauncher'"),
    (["data._target_=nonesuch.sets.Data"], 2, "data._target_"),
    (["experiment=timebridge_weather"], 2, "data.root"),
    (["data=eurosat"], 2, "data.lookback"),
    (["experiment=dinov3_dubai", "data.palette=road:AAAAAA"], 2, "data.palette=road:AAAAAA"),
    (["init_from=missing.pth"], 2, "init_from=missing.pth"),
    (["task=predict", "task.max_images=3", "init_from=w.pth"], 2, "task.max_images"),
    (["task=env", "nproc=2"], 2, "task=doctor"),
    (["backend=gcu"], 3, "backend=gcu"),
    (["backend=cuda"], 3, "backend=cuda"),
]  # fmt: skip


@pytest.mark.parametrize("refused", [REFUSED, pytest.param(VARIANTS, marks=pytest.mark.extended)])
def test_a_refusal_is_one_line_with_the_key_and_leaves_nothing(exp, refused):
    (exp.folder / "w.pth").touch()
    exp.path("table.csv").write_text("date,a\n" + "".join(f"2020-01-{day + 1:02},{day}\n" for day in range(20)))
    exp.path("empty").mkdir()
    lines = [line if any("backend=" in word for word in line) else ["backend=cpu", *line] for line, _, _ in refused]
    for (line, code, key), (ended, said, _) in zip(refused, one_by_one(exp.folder, lines)):
        first = (said.splitlines() or [""])[0]
        assert (ended, first[:7], key in first) == (code, "error: ", True), (line, ended, said)
        assert "Traceback" not in said
    assert {path.name for path in exp.folder.iterdir()} == {"empty", "table.csv", "w.pth"}


def everything(folder) -> dict:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["optim.type=Nope", "output_dir=empty/deep/er"], "optim.type=Nope"),
        pytest.param(["launcher=torchrun", "launcher.rdzv_endpoint=127.0.0.1:PORT"], "PORT",
                     marks=pytest.mark.extended),
        pytest.param(["data.horizon=5000"], "data.horizon=5000", marks=pytest.mark.extended),
        pytest.param(["task=parity", "reference=cpu", "optim.type=Nope"], "optim.type", marks=pytest.mark.extended),
        pytest.param(["-m", "optim.type=Nope", "seed=1,2"], "optim.type=Nope", marks=pytest.mark.extended),
        pytest.param(["launcher=submitit", "launcher.cluster=local", "launcher.poll_s=0.2", "optim.type=Nope"],
                     "optim.type", marks=pytest.mark.extended),
    ],
)  # fmt: skip
def test_what_workers_refuse_leaves_no_folder_either(exp, arguments, key):
    exp.path("empty").mkdir()
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = str(held.getsockname()[1])
        done = exp(*FORECAST, *(word.replace("PORT", port) for word in arguments))
    assert done.returncode == 2, done.stderr
    assert key.replace("PORT", port) in done.stderr.splitlines()[0]
    assert "log:" not in done.stderr
    assert set(everything(exp.folder)) - {"outputs"} == {"empty"}


def test_a_run_that_is_refused_or_fails_at_once_leaves_the_record_of_the_one_before(copy_of, exp):
    run = copy_of("forecast")
    before = everything(run)
    (exp.folder / "late.py").write_text(
        "from exp.forecasting.timebridge.model import TimeBridge\nclass Fails(TimeBridge):\n"
        "    def losses(self, *batch):\n        raise RuntimeError('the card fell off the bus')\n"
    )
    for arguments, code in (
        ([], 2),
        (["overwrite=true", "resume=auto"], 2),
        (["resume=auto", "model.d_model=32"], 2),
        (["resume=auto", "optim.type=Nope"], 2),
        (["overwrite=true", "model._target_=late.Fails"], 1),
    ):
        done = exp(*FORECAST, "output_dir=run", *arguments)
        assert done.returncode == code, done.stdout + done.stderr
        after = everything(run)
        changed = {name for name in {*before, *after} if before.get(name) != after.get(name)}
        assert not {name for name in changed if not name.startswith(("logs", ".start"))}, (arguments, changed)
    assert result(run)["status"] == "completed"


def test_a_run_that_starts_takes_the_place_of_the_one_before(copy_of, exp):
    run = copy_of("forecast")
    (run / "notes.txt").write_text("mine")
    assert exp(*FORECAST, "output_dir=run", "overwrite=true", "max_steps=2").returncode == 0
    assert (result(run)["steps"], result(run)["resumed_from"]) == (2, None)
    assert {path.name for path in (run / "checkpoints").glob("step_*.pth")} == {"step_00000002.pth"}
    assert max(json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()) == 2
    assert not [path for path in run.iterdir() if path.name.startswith(".start")]
    assert (run / "notes.txt").read_text() == "mine"


def test_a_record_that_holds_something_else_is_named(copy_of, exp):
    run = copy_of("forecast")
    for name in ("result.json", "config.yaml"):
        kept = (run / name).read_bytes()
        (run / name).write_bytes(b"\xff\xfe\x00")
        for arguments in (["output_dir=run", "resume=auto"], ["task=eval", "init_from=run", "output_dir=eval"]):
            if (arguments[0], name) != ("task=eval", "result.json"):  # which needs none
                done = exp(*FORECAST, *arguments)
                assert (done.returncode, f"run/{name}" in done.stderr.splitlines()[0]) == (2, True), done.stderr
        assert exp("task=report", "run=run", "output_dir=report").returncode == 0  # the table and the page say it
        (run / name).write_bytes(kept)


@pytest.mark.extended
def test_what_has_been_computed_before_an_error_of_the_data_is_kept(exp):
    (exp.folder / "late.py").write_text(
        "from exp.errors import DataError\nfrom exp.forecasting.timebridge.model import TimeBridge\n\n\n"
        "class Late(TimeBridge):\n    steps = 0\n\n    def losses(self, *batch):\n        self.steps += 1\n"
        "        if self.steps > 3:\n            raise DataError('row 7 of plant.csv: no number')\n"
        "        return super().losses(*batch)\n"
    )
    done = exp(*FORECAST, "model._target_=late.Late", "output_dir=run", "log_every=1", HYDRA_FULL_ERROR="1")
    assert done.returncode == 2, done.stderr
    assert "row 7 of plant.csv" in done.stderr
    assert "Traceback" in done.stderr  # which was asked for
    assert len((exp.path("run") / "metrics.jsonl").read_text().splitlines()) >= 2
    assert result(exp.path("run"))["error"]["type"] == "DataError"


@pytest.mark.extended
def test_a_run_whose_folder_is_deleted_says_so(exp):
    (exp.folder / "late.py").write_text(
        "import shutil\nfrom exp.forecasting.timebridge.model import TimeBridge\n\n\n"
        "class Deletes(TimeBridge):\n    steps = 0\n\n    def losses(self, *batch):\n        self.steps += 1\n"
        "        if self.steps == 3:\n            shutil.rmtree('run', ignore_errors=True)\n"
        "        return super().losses(*batch)\n"
    )
    done = exp(*FORECAST, "model._target_=late.Deletes", "output_dir=run", "nproc=2")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "run was deleted or moved" in done.stderr.splitlines()[0]


@pytest.mark.extended
def test_a_command_line_that_only_answers_is_quick_and_loads_no_torch(exp):
    """``fresh``: what is imported is what is tested."""
    (exp.folder / "torch.py").write_text("raise SystemExit('torch was imported')\n")
    for words, code in ((["--help"], 0), (["--cfg", "job"], 0), (["nprox=2"], 2)):
        done = exp(*words, fresh=True, PYTHONPATH=str(exp.folder))
        assert done.returncode == code, done.stderr
        assert "torch was imported" not in done.stdout + done.stderr
