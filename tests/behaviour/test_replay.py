"""``debug.replay_every``: a step whose bits differ when it is computed again ends the run, by rank and module."""

from __future__ import annotations

import pytest

from exp.hardware.compat import supports_full_sharding, supports_replay
from tests.behaviour.conftest import TOY_DATA, first_line, losses, ran, result
from tests.simulators import needs_current_card

MODEL = """
from exp.models.dropout import Dropout

class Flip(nn.Module):
    # Flips the lowest bit of one value: on one rank, in the pass of this number, or in all from there on.
    def __init__(self, rank, at, always):
        super().__init__()
        self.rank, self.at, self.always, self.count = rank, at, always, 0

    def forward(self, x):
        self.count += self.training
        rank = dist.get_rank() if dist.is_initialized() else 0
        if rank == self.rank and self.training and (self.count == self.at or self.always and self.count > self.at):
            bits = x.detach().view(torch.int32).clone()
            bits[0, 3] ^= 1
            x = x + (bits.view(torch.float32) - x.detach())
        return x

class Draws(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x):
        return x + 0.1 * torch.rand(x.shape, generator=self.generator) if self.training else x

class Net(Model):
    def __init__(self, rank=-1, at=0, always=False, draws=False, own=False):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), Dropout(0.2))
        self.faulty = Draws() if draws else Flip(rank, at, always)
        self.head = nn.Linear(16, 1)

    def forward(self, x, y=None, mode="tensor"):
        out = self.head(self.faulty(torch.tanh(self.body(x)))).squeeze(-1)
        return {"loss": nn.functional.mse_loss(out, y)} if mode == "loss" else out

class Own(Net):
    def train_step(self, data, optim_wrapper):
        return super().train_step(data, optim_wrapper)
"""
RUN = [
    "experiment=plain", "plugins=[toys]", "data=custom", "data._target_=toys.Toy", "model=custom",
    "model._target_=toys.Net", "max_steps=8", "max_epochs=null", "log_every=1", "checkpoint.every_steps=2",
    "global_batch_size=12", "plots=false", "sanity_check=false", "backend=cpu",
]  # fmt: skip
REPLAY = "debug.replay_every=3"
needs_replay = pytest.mark.skipif(not supports_replay(), reason="needs torch >= 2.0")


@pytest.fixture
def toy(exp):
    (exp.folder / "toys.py").write_text(TOY_DATA + MODEL)
    return exp


@pytest.mark.extended
@needs_replay
@pytest.mark.parametrize(
    "words",
    [
        ["nproc=2", "accumulate=2", "precision=bf16", "optim.clip_grad_norm=0.1"],
        pytest.param(
            ["backend=gcu", "backend.simulate=true", "nproc=2", "precision=fp16", "dropout_by_sample=true"],
            marks=needs_current_card,
        ),
    ],
)
def test_the_training_is_the_same_with_and_without(toy, words):
    """Random states of dropout, running statistics, the loss scaler and what resumes from it are as they were."""
    ran(toy, *RUN, *words, "output_dir=plain")
    ran(toy, *RUN, *words, REPLAY, "output_dir=replayed")
    assert losses(toy.path("replayed")) == losses(toy.path("plain"))
    assert result(toy.path("replayed"))["metrics"] == result(toy.path("plain"))["metrics"]
    assert result(toy.path("replayed"))["steps_replayed"] == 3  # 1, 3 and 6
    ran(toy, *RUN, *words, REPLAY, "resume=replayed/checkpoints/step_00000006.pth", "output_dir=resumed")
    plain = losses(toy.path("plain"))
    assert losses(toy.path("resumed")) == {step: plain[step] for step in (7, 8)}


@needs_replay
def test_a_bit_that_flips_once_names_the_rank_and_the_first_module_that_differs(toy):
    # Passes: 1 real, 2 again, 3 of the neighbor's batch; step 2; step 3.
    done = ran(toy, *RUN, REPLAY, "nproc=2", "+model.rank=1", "+model.at=5", "output_dir=run", code=1)
    assert "failed: rank 1 (cpu" in first_line(done)
    assert "two results for step 3: first the output of faulty differs" in first_line(done)
    assert "task=doctor" in done.stderr
    assert sorted(path.name for path in toy.path("run/checkpoints").glob("step_*")) == ["step_00000002.pth"]
    assert "the last step that had the same result again is 1; no checkpoint is before that" in done.stderr


@pytest.mark.extended
@needs_replay
def test_a_rank_that_is_always_wrong_is_found_by_its_neighbors(toy):
    words = ["+model.rank=1", "+model.always=true"]
    done = ran(toy, *RUN, REPLAY, "nproc=3", *words, "+model.at=8", "output_dir=three", code=1)
    assert "failed: rank 1 (cpu" in first_line(done)
    assert " or rank " not in first_line(done)
    assert "another result than its neighbors for step 6: first the output of faulty" in first_line(done)
    assert "step_00000002.pth is before that" in done.stderr
    done = ran(toy, *RUN, REPLAY, "nproc=2", *words, "output_dir=two", code=1)  # from the first step on
    assert "rank 0 (cpu" in first_line(done)
    assert "or rank 1 (cpu" in first_line(done)


@pytest.mark.legacy
def test_what_cannot_be_computed_again_is_refused_by_name(toy):
    def refusal(*words):
        return first_line(ran(toy, *RUN, REPLAY, *words, "output_dir=refused", code=2))

    if not supports_replay():
        assert "debug.replay_every: it needs torch 2.0" in refusal()
        return
    draws = refusal("+model.draws=true")
    assert "not deterministic here: first the output of faulty differs" in draws
    assert "compile=true" in refusal("compile=true")
    assert "train_step of its own" in refusal("model._target_=toys.Own")
    if supports_full_sharding():
        assert "wrapper=fsdp" in refusal("nproc=2", "wrapper=fsdp")
