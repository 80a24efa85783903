"""wrapper=fsdp: the numbers of DDP, a share of the memory, and checkpoints that any number of ranks goes on from."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn

from exp.compat import supports_full_sharding
from exp.engine.fsdp import FullyShard, units_of
from exp.errors import ConfigError
from tests.conftest import TINY
from tests.simulators import needs_current_card

needs_sharding = pytest.mark.skipif(not supports_full_sharding(), reason="needs torch >= 2.7")

# A few steps of a vision transformer with a frozen block, recomputed activations, two micro-batches and clipping.
TRAIN = """
import os, torch, torch.distributed as dist
from exp.engine.fsdp import FullyShard, is_sharded, sharded_parameters
from exp.engine.optim import BackendOptimWrapper
from exp.engine.wrapper import wrap
from exp.vision.dinov3 import SceneClassifier
torch.set_num_threads(1)

def train(kind, precision="fp32", **options):
    torch.manual_seed(0)
    model = SceneClassifier(size="tiny", num_classes=3, freeze=1,
                            activation_checkpointing=True, layer_scale=1.0)
    if kind == "fsdp":
        model = FullyShard(precision, **options).place(model, backend, device)
        ddp = model
    else:
        ddp = wrap(model.to(device), "ddp", {}, backend, device)
    held = backend.memory().get("allocated", 0)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    optim = BackendOptimWrapper(optimizer, backend, precision, accumulate=2, clip_grad_norm=0.1, model=model)
    losses, norms = [], []
    model.train()
    for step in range(4):
        loss = 0.0
        for micro in range(2):
            torch.manual_seed(10 * step + micro)
            image = torch.randint(0, 255, (world_size, 2, 3, 64, 64)).float()
            label = torch.randint(0, 3, (world_size, 2))
            batch = {"image": image[rank].to(device), "label": label[rank].to(device)}
            loss += ddp.train_step(batch, optim)["loss"].item() / 2
        mean = torch.tensor([loss])
        group.sum(mean)
        losses.append(mean.item() / world_size)
        norms.append(float(optim.grad_norm))
    count = sum(p.numel() for p in model.parameters())
    found = {"losses": losses, "norms": norms, "held": held, "bytes": 4 * count}
    found["state"] = sum(v.to_local().numel() if hasattr(v, "to_local") else v.numel()
                         for s in optimizer.state.values() for v in s.values())
    return found

if name != "cpu":
    backend.simulate = True
device = backend.set_device(rank)
group = join()
found = [train("ddp"), train("fsdp"), train("ddp", "bf16"), train("fsdp", "bf16", gather_dtype="bfloat16")]
backend.destroy_process_group()
print(json.dumps(found), flush=True)
os._exit(0)
"""


@needs_sharding
@pytest.mark.parametrize("backend", ["cpu", pytest.param("gcu", marks=needs_current_card)])
def test_trains_as_ddp_does_with_a_share_of_the_memory(ranks, backend):
    for ddp, fsdp, ddp_bf16, fsdp_bf16 in ranks(TRAIN, world_size=2, backend=backend):
        assert fsdp["losses"] == pytest.approx(ddp["losses"], rel=1e-5)
        assert fsdp["norms"] == pytest.approx(ddp["norms"], rel=1e-4)
        assert fsdp_bf16["losses"] == pytest.approx(ddp_bf16["losses"], rel=2e-2)
        assert fsdp["state"] < 0.55 * ddp["state"]
        if backend == "gcu":  # weights and buffers, before the first step
            assert fsdp["held"] - ddp["held"] < 0.55 * fsdp["bytes"]


BUILD = """
import os, resource, torch
from torch import nn
from exp.engine import deferred
from exp.engine.fsdp import FullyShard, sharded_parameters
torch.set_num_threads(1)

class Net(nn.Module):
    def __init__(self, kind, blocks=24):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(1024, 1024) for _ in range(blocks)])
        self.register_buffer("scale", torch.full((3,), 1.0 + rank), persistent=False)
        self.head = nn.Linear(1024, 2)
        self.head.weight.requires_grad_(False)
        if kind == "value":
            self.share = torch.linspace(0, 1, 3)[1].item()
        if kind == "hidden":
            self.kept = {"table": [torch.ones(2)]}

def held():  # MiB of host memory
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() / 2**20

if name != "cpu":
    backend.simulate = True
device = backend.set_device(rank)
group = join()
found = {}
deferred.build(lambda: Net("plain", blocks=1), lambda model: None, group)  # what torch imports for it counts for nobody
for kind in ("plain", "value", "hidden"):
    before = held()
    fitted = []
    model = deferred.build(lambda: Net(kind), fitted.append, group)
    found[kind] = model.head.weight.is_meta
    assert bool(fitted) is not found[kind]
    if kind == "plain":
        found["built"] = held() - before
        model = FullyShard().place(model, backend, device)
        found["scale"] = model.scale.tolist()
        found["frozen"] = [name for name, each in model.named_parameters() if not each.requires_grad]
        shards = {name: value.to_local().cpu() for name, value in sharded_parameters(model).items()}
        whole = dict(Net(kind).named_parameters())
        found["differs"] = [name for name in whole if not torch.equal(shards[name], whole[name].chunk(2)[rank])]
backend.destroy_process_group()
print(json.dumps(found), flush=True)
os._exit(0)
"""


@needs_sharding
@pytest.mark.parametrize("backend", ["cpu", pytest.param("gcu", marks=needs_current_card)])
def test_rank_0_alone_has_the_model_whole_in_host_memory(ranks, backend):
    first, second = ranks(BUILD, world_size=2, backend=backend)
    assert (first["plain"], second["plain"]) == (False, True)
    assert first["built"] > 90, "24 blocks of 4 MiB"
    assert second["built"] < 4, "not one of them"
    for found in (first, second):
        assert found["differs"] == []
        assert found["scale"] == [1.0] * 3
        assert found["frozen"] == ["head.weight"]
        assert (found["value"], found["hidden"]) == (False, False), "such models are built whole"


class Block(nn.Linear):
    pass


def test_units_are_the_members_of_the_outermost_lists_of_repeated_modules():
    inner = nn.Sequential(Block(2, 2), nn.ReLU(), Block(2, 2))
    model = nn.ModuleDict({
        "body": nn.ModuleList([nn.ModuleList([Block(2, 2), Block(2, 2)]), nn.ModuleList([inner, inner])]),
        "head": nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)),
    })  # fmt: skip
    assert units_of(model)[:2] == list(model["body"][0])
    assert model["head"][0] not in units_of(model)
    model.sharded_units = lambda: [inner]
    assert units_of(model) == [inner]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"precision": "fp16"}, "precision=bf16"),
        ({"gather_dtype": "bfloat16"}, "needs precision=bf16"),
        ({"reduce_dtype": "int8"}, "float32, bfloat16"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, named):
    with pytest.raises(ConfigError, match=named):
        FullyShard(**options)


class Touch:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@needs_sharding
def test_the_index_of_shards_runs_no_code(tmp_path):
    from exp.engine.sharded_files import load_shards

    (tmp_path / ".metadata").write_bytes(pickle.dumps(Touch(tmp_path / "touched")))
    with pytest.raises(pickle.UnpicklingError, match="has no place"):
        load_shards(tmp_path, lambda _: None)
    assert not (tmp_path / "touched").exists()


# -- whole runs -----------------------------------------------------------------------------------------------------

RUN = ["model.attention_dropout=0", "log_every=1", "optim.clip_grad_norm=0.5", "checkpoint.every_steps=2",
       "val_every=2", "checkpoint.keep_last=9"]  # fmt: skip


@needs_sharding
def test_goes_on_from_any_number_of_ranks_and_either_wrapper(exp):
    exp.train("ddp", *RUN, "nproc=2", "wrapper=ddp")
    expected = exp.losses("ddp")
    result = exp.train("fsdp", *RUN, "nproc=4", "wrapper=fsdp")
    assert exp.losses("fsdp") == pytest.approx(expected, rel=1e-5)
    assert result["wrapper"] == "fsdp"
    assert result["metric"] == pytest.approx(exp.result("ddp")["metric"], rel=1e-5)
    half = "checkpoints/step_00000002.pth"
    others = {
        "fewer": (f"resume=fsdp/{half}", "nproc=2", "wrapper=fsdp"),
        "one": (f"resume=fsdp/{half}", "nproc=1"),
        "back": (f"resume=ddp/{half}", "nproc=2", "wrapper=fsdp"),
    }
    for name, arguments in others.items():
        result = exp.train(name, *RUN, *arguments)
        assert result["resumed_from"]
        assert exp.losses(name) == pytest.approx({step: expected[step] for step in (3, 4)}, rel=1e-5)
    (best,) = exp.path("fsdp").glob("checkpoints/best_*.safetensors")
    done = exp("task=eval", f"init_from={best.parents[1]}", "output_dir=eval")
    assert done.returncode == 0, done.stderr
    assert exp.result("eval")["metric"] == pytest.approx(exp.result("fsdp")["metric"], rel=1e-5)
    from safetensors.torch import load_file

    whole = torch.load(str(exp.path("ddp") / "checkpoints" / "best.pth"), weights_only=True)["state_dict"]
    weights = load_file(str(best))
    assert weights.keys() == whole.keys()
    for name, value in whole.items():
        assert torch.allclose(weights[name], value, rtol=1e-4, atol=1e-5), name
    next(exp.path("fsdp").glob("checkpoints/step_00000004.shards*/*.distcp")).unlink()
    done = exp(*TINY, *RUN, "resume=auto", "output_dir=fsdp", "nproc=2", "wrapper=fsdp")
    assert "step_00000004.shards0 beside it is missing or not as it was written" in done.stdout
