"""Spoilt files: no wrong number leaves with exit code 0."""

from __future__ import annotations

import pytest
import torch

from tests.behaviour.conftest import TINY, first_line, result


def test_weights_fit_wholly_or_are_refused(exp, trained):
    """A tensor that lacks, one of another shape, one that is not finite, one too many."""
    good = torch.load(str(trained("forecast") / "checkpoints" / "best.pth"))["state_dict"]
    name = next(key for key, value in good.items() if value.dim() == 2)
    for kind, wrong in (
        ("lacks", {key: value for key, value in good.items() if key != name}),
        ("shape", {**good, name: good[name][:-1]}),
        ("nan", {**good, name: good[name] * float("nan")}),
        ("surplus", {**good, "surplus.weight": torch.zeros(2)}),
    ):
        torch.save(wrong, str(exp.path(f"{kind}.pth")))
        done = exp(*TINY, "task=eval", f"init_from={kind}.pth", "output_dir=tested")
        assert done.returncode == 2, (kind, done.stdout)
        assert ("surplus.weight" if kind == "surplus" else name) in done.stderr, (kind, done.stderr)
        assert not exp.path("tested").exists()
    torch.save({f"module.{key}": value for key, value in good.items()}, str(exp.path("good.pth")))
    done = exp(*TINY, "task=eval", "init_from=good.pth", "output_dir=tested")
    assert done.returncode == 0, done.stderr
    assert exp.result("tested")["metrics"] == pytest.approx(result(trained("forecast"))["metrics"], rel=1e-6)


def test_data_that_are_not_there_or_malformed_are_an_error_with_file_and_place(exp):
    (exp.folder / "data").mkdir()
    hours = [f"2020-01-{1 + hour // 24:02} {hour % 24:02}:00:00" for hour in range(400)]
    rows = [f"{date},{index % 24},{index % 7}.5" for index, date in enumerate(hours)]
    own = ["data=csv", "data.root=data", "data.file=mine.csv", "data.channels=2", "data.name=mine", "data.horizon=24",
           "data.lookback=48"]  # fmt: skip
    plain = [word for word in TINY if not word.startswith("data.")]
    for spoilt, named in (
        (None, "mine.csv"),
        ([*rows[:50], f"{hours[50]},oops,1.0", *rows[51:]], "mine.csv"),
    ):
        if spoilt is not None:
            (exp.folder / "data" / "mine.csv").write_text("\n".join(["date,a,b", *spoilt]) + "\n")
        done = exp(*plain, *own, "output_dir=run")
        assert done.returncode == 2, (named, done.stdout)
        assert named in first_line(done), done.stderr
        assert not exp.path("run").exists()


def test_names_of_strangers_are_text_in_the_report(exp, copy_of):
    copy_of("forecast", "runs/<script>alert(1)<")
    done = exp("task=report", "run=runs", "output_dir=report")
    assert done.returncode == 0, done.stderr
    (page,) = exp.folder.rglob("report.html")
    assert "alert(1)" in page.read_text()
    assert "<script>alert" not in page.read_text()
