"""A rank that is slower than the others is named, with what is slow in it; the others' waiting does not count."""

from __future__ import annotations

import pytest

from exp.hardware.compat import supports_full_sharding
from tests.behaviour.conftest import TOY_DATA, ran, result
from tests.conftest import read_strictly
from tests.simulators import needs_current_card, needs_legacy_card

MODEL = """

class Late(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        sleeps(ctx.seconds, 1)
        return gradient, None

class Net(Model):
    def __init__(self, forward=0.0, backward=0.0):
        super().__init__()
        self.a, self.b, self.seconds = nn.Linear(8, 16), nn.Linear(16, 1), (forward, backward)

    def forward(self, x, y=None, mode="tensor"):
        out = self.b(Late.apply(torch.tanh(self.a(x)), self.seconds[1])).squeeze(-1)
        if mode != "loss":
            return out
        sleeps(self.seconds[0], 1)
        return {"loss": nn.functional.mse_loss(out, y)}
"""
RUN = [
    "experiment=plain", "plugins=[toys]", "data=custom", "data._target_=toys.Toy", "model=custom",
    "model._target_=toys.Net", "max_steps=20", "max_epochs=null", "log_every=5", "global_batch_size=12", "plots=false",
    "sanity_check=false", "backend=cpu",
]  # fmt: skip
SLOW = {"data": "+data.slow=0.04", "forward": "+model.forward=0.2", "backward": "+model.backward=0.2"}


@pytest.fixture
def toy(exp):
    (exp.folder / "toys.py").write_text(TOY_DATA + MODEL)
    return exp


def named(run):
    """The train lines that name slow ranks, by step."""
    records = [read_strictly(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {record["step"]: record["slow_ranks"] for record in records if "slow_ranks" in record}


@pytest.mark.parametrize(
    "part",
    [
        pytest.param("data", marks=pytest.mark.extended),
        pytest.param("forward", marks=pytest.mark.extended),
        "backward",
    ],
)
def test_the_slow_rank_is_named_once_with_what_is_slow(toy, part):
    nproc = 3 if part == "backward" else 2
    done = ran(toy, *RUN, SLOW[part], f"nproc={nproc}", "output_dir=run")
    found = result(toy.path("run"))
    (warning,) = found["warnings"]
    assert warning.startswith("rank 1 (")
    assert f"{part} takes" in warning
    assert done.stdout.count(warning) == 1
    times, ((step, (slow,)),) = found["rank_times"], named(toy.path("run")).items()
    assert (times["unmeasured"], times["slow"]) == (None, [slow])
    assert (slow["rank"], slow["part"], slow["step"], step) == (1, part, 20, 20)
    assert slow["seconds"][part] > 0.1 > max(times["seconds"][part][0], slow["median_seconds"][part])
    for other in set(SLOW) - {part}:  # nobody's waiting for rank 1 is in it
        assert max(times["seconds"][other]) < 0.1


def test_no_rank_is_named_where_none_is_slow_or_only_one_trains(toy):
    ran(toy, *RUN, "accumulate=2", "nproc=2", "+model.forward=-0.1", "output_dir=two")
    assert named(toy.path("two")) == {}
    assert result(toy.path("two"))["rank_times"]["slow"] == result(toy.path("two"))["warnings"] == []
    ran(toy, *RUN, "+model.forward=0.01", "output_dir=one")
    assert result(toy.path("one"))["rank_times"] is None


@pytest.mark.extended
@pytest.mark.parametrize(
    ("words", "reason"),
    [
        pytest.param(
            ["wrapper=fsdp"],
            "wrapper=fsdp",
            marks=pytest.mark.skipif(not supports_full_sharding(), reason="needs torch >= 2.7"),
        ),
        pytest.param(
            ["backend=gcu", "backend.simulate=true"],
            "xla has no timed events",
            marks=[needs_legacy_card, pytest.mark.legacy],
        ),
        (["wrapper.broadcast_buffers=true"], None),
    ],
)
def test_where_a_pass_includes_waiting_only_the_data_are_measured_and_that_is_said(toy, words, reason):
    ran(toy, *RUN, *words, SLOW["data"], "nproc=2", "output_dir=run")
    times = result(toy.path("run"))["rank_times"]
    assert list(times["seconds"]) == (["data"] if reason else ["data", "forward", "backward"])
    assert reason is None or reason in times["unmeasured"]
    assert [(slow["rank"], slow["part"]) for slow in times["slow"]] == [(1, "data")]
    log = (toy.path("run") / "logs" / "rank0.log").read_text()
    assert reason is None or times["unmeasured"] in log


@pytest.mark.extended
@needs_current_card
def test_events_of_a_card_name_the_slow_rank(toy):
    cards = ["backend=gcu", "backend.simulate=true", "nproc=2", "output_dir=run"]
    ran(toy, *RUN[:-1], SLOW["backward"], *cards)
    times = result(toy.path("run"))["rank_times"]
    assert [(slow["rank"], slow["part"]) for slow in times["slow"]] == [(1, "backward")]
