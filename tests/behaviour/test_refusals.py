"""Exit codes: what cannot be is refused in one line that names the key or file, and leaves no folder."""

from __future__ import annotations

import pytest

from tests.behaviour.conftest import first_line

REFUSED = [
    (["nprox=2"], 2, "nproc"),
    (["model.d_modle=64"], 2, "model.d_model"),
    (["model.d_model=wide"], 2, "d_model"),
    (["backend=cudaa"], 2, "cuda"),
    (["nproc=["], 2, "nproc"),
    (["precision=fp8"], 2, "precision"),
    (["backend=cpu", "precision=fp16"], 2, "bf16"),
    (["backend=cpu", "wrapper=none", "nproc=2"], 2, "wrapper"),
    (["backend=cpu", "nproc=2", "global_batch_size=33"], 2, "34"),
    (["backend=cpu", "nproc=2", "accumulate=4", "global_batch_size=30"], 2, "32"),
    (["+wrapper.device_ids=[0]"], 2, "device_ids"),
    (["data.root=/nowhere"], 2, "ETTh1.csv"),
    (["init_from=missing.pth"], 2, "missing.pth"),
    (["task=eval"], 2, "init_from"),
    (["optim.type=Nope"], 2, "optim.type"),
    (["data.horizon=5000"], 2, "data.horizon"),
    (["data=csv"], 2, "data.file"),
    (["model=dinov3_scenes"], 2, "experiment=dinov3_eurosat"),
    (["output_dir=file/run"], 2, "file"),
    (["+foo=1"], 2, "foo"),
    (["+model.foo=1"], 2, "model.foo"),
    (["+optim.foo=1"], 2, "optim.foo"),
    (["task=eval", "init_from=outputs/typo"], 2, "init_from=outputs/typo"),
    (["task=predict", "init_from=typo", "experiment=dinov3_loveda", "model.size=tiny"], 2, "init_from=typo"),
    (["task=eval", "init_from=."], 2, "init_from=."),
    (["resume=typo"], 2, "resume=typo"),
    (["backend=cpu", "backend.simulate=true"], 2, "backend"),
    (["backend=gcu"], 3, "torch_gcu"),
    (["backend=cuda"], 3, "backend=cuda"),
    (["logger.requires=[nonesuch]"], 3, "nonesuch"),
]


def test_what_cannot_be_is_one_line_with_its_code_and_leaves_nothing(exp):
    (exp.folder / "file").write_text("mine")
    wrong = []
    for words, code, named in REFUSED:
        done = exp(*(["backend=cpu"] if not any(word.startswith("backend") for word in words) else []), *words)
        line = first_line(done) if done.stderr else ""
        if done.returncode != code or named not in line or not line.startswith("error: "):
            wrong.append((words, done.returncode, line))
        if [path.name for path in exp.folder.iterdir()] != ["file"]:
            wrong.append((words, "leaves", sorted(map(str, exp.folder.rglob("*")))))
            break
    assert not wrong, wrong


def test_help_lists_what_can_be_chosen_and_a_configuration_can_be_seen_before_it_runs(exp):
    done = exp("--help")
    assert done.returncode == 0
    for name in ("timebridge_etth1", "dinov3_dubai", "gcu", "rocm", "submitit", "fsdp", "doctor", "global_batch_size"):
        assert name in done.stdout
    done = exp("--cfg", "job", "nproc=3", "experiment=timebridge_etth1")
    assert done.returncode == 0
    assert "nproc: 3" in done.stdout
    assert list(exp.folder.iterdir()) == []


@pytest.mark.extended
def test_a_command_line_that_only_answers_is_quick_and_loads_no_torch(exp):
    """``fresh``: what is imported is what is tested."""
    (exp.folder / "torch.py").write_text("raise SystemExit('torch was imported')\n")
    for words, code in ((["--help"], 0), (["--cfg", "job"], 0), (["nprox=2"], 2)):
        done = exp(*words, fresh=True, PYTHONPATH=str(exp.folder))
        assert done.returncode == code, done.stderr
        assert "torch was imported" not in done.stdout + done.stderr
