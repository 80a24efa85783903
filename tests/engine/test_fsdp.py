"""wrapper=fsdp: the numbers of DDP, a share of the memory, and checkpoints from which any number of ranks goes on.

They are written beside the training, by threads that need no collective.
"""

from __future__ import annotations

import json
import signal

import pytest
import torch
from torch import nn

from exp.engine.checkpoint.policy import remove_leftovers
from exp.engine.checkpoint.reader import list_checkpoints, read_checkpoint
from exp.engine.fsdp import units_of
from tests.behaviour.conftest import SCENES
from tests.conftest import Forked
from tests.engine.conftest import ON_DEVICES, needs_sharding
from tests.simulators import needs_current_card

BUILD = """
from exp.engine.fsdp import FullyShard, local_part, sharded_parameters, unsharded

class Net(nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList([nn.Linear(1024, 1024) for _ in range(24)])
        self.register_buffer("scale", torch.full((3,), 1.0 + seed), persistent=False)
        self.head = nn.Linear(1024, 2)
        self.head.weight.requires_grad_(False)

group = join()
model = FullyShard().move_to_device(Net(rank), backend, device)
found = {"card": backend.usage().get("allocated", 0) / 2**20, "scale": model.scale.tolist()}
found["frozen"] = [name for name, each in model.named_parameters() if not each.requires_grad]
first = dict(Net(0).named_parameters())
found["differs"] = [name for name, value in sharded_parameters(model).items()
                    if not torch.equal(local_part(value).cpu(), first[name].chunk(2)[rank])]
with unsharded(model), torch.no_grad():
    for _ in range(rank):  # other ranks need not take part
        model.blocks[3](torch.ones(1, 1024, device=device))
found["sharded"] = all(hasattr(each, "to_local") for each in model.parameters())
end(found)
"""


@needs_sharding
@needs_current_card
def test_ranks_have_a_half_of_the_weights_of_rank_0_each_but_for_evaluation(ranks):
    """24 blocks of 4 MiB."""
    for found in ranks(ON_DEVICES + BUILD, world_size=2, backend="gcu"):
        assert found.pop("card") < 0.55 * 96
        assert found == {"scale": [1.0] * 3, "frozen": ["head.weight"], "differs": [], "sharded": True}


def test_units_are_the_members_of_the_outermost_lists_of_repeated_modules():
    blocks = [nn.Linear(2, 2), nn.Linear(2, 2)]
    inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    head = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    body = nn.ModuleList([nn.ModuleList(blocks), nn.ModuleList([inner, inner])])
    model = nn.ModuleDict({"body": body, "head": head})
    assert units_of(model)[:2] == blocks
    assert head[0] not in units_of(model)
    model.sharded_units = lambda: [inner]
    assert units_of(model) == [inner]


# A sharded model with layers of odd sizes, a frozen bias and buffers; ``save`` is what the checkpoint hook does.
SAVE = """
import threading
from pathlib import Path
from torch.distributed.checkpoint import FileSystemWriter
from exp.engine.checkpoint.reader import read_checkpoint
from exp.engine.checkpoint.writer import CheckpointWriter
from exp.engine.fsdp import FullyShard
from exp.engine.optim import BackendOptimWrapper
from exp.errors import RunError

group = join()
torch.manual_seed(0)
layers = [nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)]
layers[0].bias.requires_grad_(False)
model = FullyShard().move_to_device(nn.Sequential(*layers), backend, device)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1, foreach=False)
optim = BackendOptimWrapper(optimizer, backend, "fp32", model=model)
writer = CheckpointWriter(backend, group, sharded=True)
folder = Path(os.path.realpath(folder)) / "checkpoints"
files = ["step_00000001.pth", "best.pth"]

def step():
    optim.update_params(model(torch.arange(20.0).reshape(4, 5).to(device)).square().mean())

def content(file):
    trained = {} if file == "best.pth" else {"optimizer": optimizer.state_dict()}
    return {"meta": {"step": 1}, "state_dict": model.state_dict(), **trained}

def save(file):
    writer.start({folder / file: content(file)})

def whole(value):
    if isinstance(value, dict):
        return {key: whole(each) for key, each in value.items()}
    if hasattr(value, "to_local"):
        return torch.cat(group.gather(value.to_local().detach().cpu()))
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value

go_on = threading.Event()
write_data = FileSystemWriter.write_data

def late(*arguments):
    assert go_on.wait(60)
    return write_data(*arguments)

FileSystemWriter.write_data = late
for file in files:
    step()
    expected = whole(content(file))
    go_on.clear()
    save(file)
    step()
    step()  # none of them waits for the files
    assert not (folder / file).exists()
    go_on.set()
    writer.wait()
    group.barrier()
    torch.testing.assert_close(read_checkpoint(folder / file), expected, rtol=0, atol=0)
    group.barrier()

def full(*_):
    raise OSError(28, "No space left on device")

found = [sorted(path.name for path in folder.iterdir())]
if rank == 1:
    FileSystemWriter.write_data = full
for file in files:
    save(file)
    try:
        writer.wait()
    except RunError as error:
        found.append(str(error))
    group.barrier()
    read_checkpoint(folder / file)
group.barrier()
end(found)
"""


@needs_sharding
@pytest.mark.parametrize("backend", ["cpu", pytest.param("gcu", marks=needs_current_card)])
def test_the_state_at_the_call_is_written_while_training_goes_on_or_who_cannot_write_is_named(ranks, backend):
    """The checkpoint before stays then."""
    (files, *told), (_, *own) = ranks(ON_DEVICES + SAVE, world_size=2, backend=backend)
    assert files == ["best.pth", "best.shards0", "step_00000001.pth", "step_00000001.shards0"]
    assert [each.startswith("rank 1: ") and "No space left on device" in each for each in own] == [True, True]
    assert told == own


# Kills itself with SIGKILL in its second save, when the save calls the function that the arguments name.
KILLED = """
import os, signal, sys, torch, torch.distributed as dist
from pathlib import Path
from exp.backends.cpu import CpuBackend
from exp.engine.checkpoint.policy import prune_checkpoints
from exp.distributed import Distributed
from exp.engine.fsdp import FullyShard
from exp.engine.checkpoint import writer as writer_module
from exp.engine.checkpoint.writer import CheckpointWriter

folder, owner, name = Path(sys.argv[1]), {"os": os, "writer": writer_module, "Path": Path}[sys.argv[2]], sys.argv[3]
dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 1), rank=0, world_size=1)
backend = CpuBackend(name="cpu")
model = FullyShard().move_to_device(torch.nn.Sequential(torch.nn.Linear(8, 8)), backend, torch.device("cpu"))
writer = CheckpointWriter(backend, Distributed(), sharded=True)
for step in (1, 2):
    if step == 2:
        setattr(owner, name, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
    content = {"meta": {"step": step}, "state_dict": model.state_dict()}
    path = folder / "checkpoints" / f"step_{step:08d}.pth"
    writer.start({path: content}, lambda: prune_checkpoints(path.parent, 1))
    writer.wait()
os._exit(0)
"""


@needs_sharding
@pytest.mark.parametrize(
    ("owner", "name", "left"),
    [("os", "fsync", 1), ("writer", "folder_digests", 1), ("Path", "replace", 1), ("Path", "unlink", 2)],
)
def test_a_sharded_save_that_is_killed_leaves_a_checkpoint_that_opens(tmp_path, owner, name, left):
    """While shards are written, before the file that names them, before it has its name, and before the former goes."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    process = Forked(tmp_path, str(tmp_path), owner, name, script=KILLED)
    said = process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL, said
    remove_leftovers(folder)
    content = read_checkpoint(list_checkpoints(folder)[0])
    assert (content["meta"]["step"], len(content["state_dict"])) == (left, 2)


# With a frozen block, recomputed activations, two micro-batches and clipping.
RUN = [*SCENES, "model.freeze=1", "model.backbone.activation_checkpointing=true", "accumulate=2",
       "optim.clip_grad_norm=0.05", "optim.lr=1e-3", "val_every=2"]  # fmt: skip


@needs_sharding
def test_trains_as_ddp_does_and_goes_on_from_any_number_of_ranks_and_either_wrapper(exp):
    def figures(name, *arguments):
        done = exp(*RUN, *arguments, f"output_dir={name}")
        assert done.returncode == 0, done.stderr
        records = map(json.loads, (exp.path(name) / "metrics.jsonl").read_text().splitlines())
        return [(each["loss"], each["grad_norm"]) for each in records if each["split"] == "train"]

    ddp = figures("ddp", "nproc=2")
    near = [(pytest.approx(loss, rel=1e-5), pytest.approx(norm, rel=1e-4)) for loss, norm in ddp]
    assert figures("fsdp", "nproc=4", "wrapper=fsdp") == near
    halves = [(pytest.approx(loss, rel=2e-2), pytest.approx(norm, rel=5e-2)) for loss, norm in ddp]
    assert figures("half", "nproc=2", "wrapper=fsdp", "precision=bf16") == halves
    for start in ("fsdp", "ddp"):
        half = f"resume={start}/checkpoints/step_00000002.pth"
        assert figures(f"from_{start}", "nproc=2", "wrapper=fsdp", half) == near[2:]
    best = read_checkpoint(exp.path("fsdp") / "checkpoints" / "best.pth")["state_dict"]
    whole = torch.load(str(exp.path("ddp") / "checkpoints" / "best.pth"), weights_only=True)["state_dict"]
    torch.testing.assert_close(best, dict(whole), rtol=1e-4, atol=1e-5)
    next(exp.path("fsdp").glob("checkpoints/step_00000004.shards*/*.distcp")).unlink()
    done = exp(*RUN, "resume=auto", "output_dir=fsdp", "nproc=2", "wrapper=fsdp")
    assert "step_00000004.shards0" in done.stdout
