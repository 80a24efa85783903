"""Words of other frameworks: each leads to arguments that exist, and no guess leads astray."""

from __future__ import annotations

import importlib.util
import shlex

import pytest
from hydra.errors import HydraException

from exp.config.command_line import read_options
from exp.config.compose import typed
from exp.config.words import foreign_words, translate
from exp.errors import nearest
from tests.behaviour.conftest import TINY, one_by_one
from tests.config.conftest import composed
from tests.docs.reader import ROOT

ENTRIES = [(word, right) for words in foreign_words().values() for word, right in words.items()]
VISION = ["experiment=dinov3_dubai"]
OF_IMAGES = (
    "model.backbone",
    "model.lo",
    "model.freeze",
    "model.tta",
    "data.mi",
    "data.cut",
    "data.size",
    "data.train_",
)


def test_every_answer_is_a_command_line_that_composes():
    """Together, as far as they do not set a key twice: a composition takes a fifth of a second."""
    assert len(ENTRIES) >= 120
    lines = []
    for answer in sorted({right.partition("# ")[0].strip() for _, right in ENTRIES} - {""}):
        words = read_options(shlex.split(answer))
        overrides = [word.partition(",")[0] if words.multirun else word for word in words.overrides]
        images = any(word.startswith(OF_IMAGES) and "loss=" not in word for word in overrides)
        keys, family = {word.partition("=")[0].lstrip("+") for word in overrides}, VISION if images else []
        chooses = {
            key
            for key in keys
            if "/" in key or key in ("data", "experiment", "model", "optim", "launcher", "logger", "task")
        }
        for line in lines if not chooses else []:
            if line[0] == family and not line[1] & keys:
                line[1].update(keys)
                line[2].extend(overrides)
                break
        else:
            lines.append((family, keys if not chooses else {*keys, "alone"}, overrides))
    wrong = []
    for family, _, overrides in lines:
        try:
            typed(
                composed(
                    *([] if any(word.startswith(("data=", "experiment=")) for word in overrides) else family),
                    *overrides,
                )
            )
        except HydraException as error:
            wrong.append(f"{overrides}: {error}")
    assert wrong == []


@pytest.mark.parametrize(("argument", "answer"), [
    ("gradient_clip_val=0.5", "; use optim.clip_grad_norm=0.5"),
    ("Gradient-Clip-Val=true", "; use optim.clip_grad_norm=1.0"),
    ("devices=auto", "; use nproc=4"),
    ("save_dir=my runs", "; use output_dir='my runs'"),
    ("model_name_or_path=me/net", "; use init_from=hf:me/net"),
    ("strategy=fsdp", "; use wrapper=fsdp"),
    ("strategy=horovod", "; use wrapper=ddp"),
    ("pin_memory=true", ": the backend decides"),
    ("mixture=1", ""),
])  # fmt: skip
def test_a_users_value_goes_along_where_it_is_one(argument, answer):
    key, _, value = argument.partition("=")
    assert translate(key, value) == answer


def test_no_guess_without_similarity():
    for wrong, names, answer in (
        ("gpu", ["gcu", "cuda", "cpu"], ""),
        ("AdamW", ["adam", "adamw"], "; did you mean 'adamw'?"),
        ("etth1", ["plain", "timebridge_etth1", "timebridge_prior_etth1"], "; did you mean 'timebridge_etth1'?"),
        ("optim.momentum", ["optim.options", "optim.lr"], ""),
        ("optim.wieght_decay", ["model.weight_decay", "optim.weight_decay"], "; did you mean 'optim.weight_decay'?"),
        ("x", [], ""),
    ):
        assert nearest(wrong, names) == answer


# A mistake, and what its first line says.
MISTAKES = {
    "backend=gpu": "use backend=auto",
    "task=test": "use task=eval init_from=RUN",
    "precision=16-mixed": "use precision=fp16",
    "precision=bf61": "'precision=bf16'",
    "optim=AdamW": "'optim=adamw'",
    "nproc=auto": "use nproc=8",
    "seed=1.0e1": "such as seed=10",
    "max_epochs=ten": "a whole number is expected",
    "checkpoint.keep_last=few": "such as checkpoint.keep_last=10",
    "plots=maybe": "such as plots=true",
    "compile=reduce-overhead": "use compile=true",
    "hooks=EMAHook": "'hooks=[{type: EMAHook}]'",
    "hooks=[EMAHook]": "'hooks=[{type: EMAHook}]'",
    "metrics=[mae]": "'metrics=[{_target_: my_package.MyMetric}]'",
    "task.formats=onnx task=export": "'task.formats=[onnx]'",
    "optim.lr=1e-3,1e-4": "'optim.lr=[1e-3,1e-4]'",
    "optim.lr=-1": "optim.lr=-1.0 must be at least 0",
    "wandb.project=plant": "use logger=wandb logger.trackers.wandb.project=plant",
    "trainer.max_epochs=3": "'max_epochs=3'",
    "max_epochs 3": "max_epochs=VALUE",
    "--epochs 3": "use max_epochs=3",
    "--batch-size=8": "use batch_size=8",
    "--multirn": "'--multirun'",
    "data=plant.csv": "data.file=plant.csv",
    "run=outputs": "use task=report run=outputs",
    "Backend=cpu": "'backend",
    "schedule=cosine_annealing": "'schedule=cosine'",
}


def test_a_mistake_is_answered_with_what_to_paste(exp):
    lines = [[*TINY, *mistake.split(" "), "output_dir=run"] for mistake in MISTAKES]
    for (mistake, answer), (code, said, _) in zip(MISTAKES.items(), one_by_one(exp.folder, lines)):
        assert (code, answer in said.splitlines()[0]) == (2, True), (mistake, said)
    assert list(exp.folder.iterdir()) == []


def test_the_page_has_the_table():
    spec = importlib.util.spec_from_file_location("make_words", ROOT / "docs" / "make_words.py")
    make_words = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_words)
    assert make_words.PAGE.read_text(encoding="utf-8").endswith(f"{make_words.START}\n{make_words.tables()}")
