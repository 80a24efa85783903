"""Checkpoints of sharded models: written beside the training, by threads that need no collective."""

from __future__ import annotations

import pytest

from exp.compat import supports_full_sharding
from tests.simulators import needs_current_card

pytestmark = pytest.mark.skipif(not supports_full_sharding(), reason="needs torch >= 2.7")

# A sharded model with layers of odd sizes, a frozen bias and buffers; ``save`` is what the checkpoint hook does.
BEGIN = """
import os, threading, time, torch
from pathlib import Path
from torch import nn
from exp.engine import checkpoint, sharded, sharded_files, sharded_save
from exp.engine.checkpoint_writer import CheckpointWriter
from exp.engine.fsdp import FullyShard
from exp.engine.optim import BackendOptimWrapper
from exp.errors import RunError
torch.set_num_threads(1)
if name != "cpu":
    backend.simulate = True
device = backend.set_device(rank)
group = join()
torch.manual_seed(0)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.ModuleList([nn.Linear(5, 5) for _ in range(3)])
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        for layer in self.body:
            x = layer(x)
        return self.head(self.norm(x))

model = Net()
model.body[0].bias.requires_grad_(False)
model = FullyShard().place(model, backend, device)
trained = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=0.1, foreach=False)
optim = BackendOptimWrapper(optimizer, backend, "fp32", model=model)
writer = CheckpointWriter(backend)
saver = sharded_save.ShardedSaver(group, writer.closing)
folder = Path(os.path.realpath(folder)) / "checkpoints"

def step():
    optim.update_params(model(torch.arange(20.0).reshape(4, 5).to(device)).square().mean())

def content(step=1):
    return {"meta": {"step": step}, "state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}

def save(path, prepare, **options):
    whole = content()
    if prepare == saver.best:
        del whole["optimizer"]
    part, write = prepare(path, whole)
    writer.start({path: part}, optim, True, write=write, **options)

def whole():
    tensors = {sharded.key_of(place): value for place, value in sharded._tensors(content())}
    return {key: torch.cat(group.gather(value.to_local().detach().cpu())) if hasattr(value, "to_local")
            else value.detach().cpu().clone() for key, value in tensors.items()}

def end(found):
    group.barrier()
    backend.destroy_process_group()
    print(json.dumps(found), flush=True)
    os._exit(0)
"""


@pytest.mark.parametrize("backend", ["cpu", pytest.param("gcu", marks=needs_current_card)])
def test_the_state_at_the_call_is_written_while_training_goes_on(ranks, backend):
    script = """
    go_on = threading.Event()
    for function in ("write_part", "write_rows", "put_together"):
        def late(*arguments, inner=getattr(sharded_files, function)):
            assert go_on.wait(60)
            return inner(*arguments)
        setattr(sharded_files, function, late)
    found = {}
    for file, prepare in (("step_00000001.pth", saver.training), ("best.pth", saver.best)):
        step()
        expected = whole()
        go_on.clear()
        save(folder / file, prepare)
        step()
        step()  # none of them waits for the files
        found[file + " before"] = (folder / file).exists()
        go_on.set()
        writer.wait()
        group.barrier()
        read = checkpoint.read(folder / file)
        tensors = {sharded.key_of(place): value for place, value in sharded._tensors(read)}
        found[file] = [key for key in tensors if not torch.equal(tensors[key], expected[key])]
        found[file + " lacks"] = [key for key in expected if key not in tensors and not key.startswith("optimizer")]
        found[file + " count"] = len(tensors)
    found["files"] = sorted(path.name for path in folder.iterdir())
    end(found)
    """
    for found in ranks(BEGIN + script.replace("\n    ", "\n"), world_size=2, backend=backend):
        for file in ("step_00000001.pth", "best.pth"):
            assert found[file + " before"] is False
            assert found[file] == []
            assert found[file + " lacks"] == []
        assert found["best.pth count"] == 13
        assert found["step_00000001.pth count"] == 13 + 3 * 9, "AdamW's step and two moments of what is trained"
        expected = ["best.pth", "best_00000001.safetensors", "step_00000001.pth", "step_00000001.shards0"]
        assert found["files"] == expected


def test_a_rank_that_cannot_write_is_named_and_the_former_checkpoint_stays(ranks):
    script = """
    path = folder / "step_00000001.pth"
    save(path, saver.training)
    writer.wait()
    group.barrier()
    if rank == 1:
        def full(*_):
            raise OSError(28, "No space left on device")
        sharded_files.write_part = sharded_files.write_rows = full
    found = []
    for prepare in (saver.training, saver.best):
        save(path, prepare)
        try:
            writer.wait()
            found.append(None)
        except RunError as error:
            found.append(str(error))
        group.barrier()
    checkpoint.read(path)
    end(found)
    """
    first, second = ranks(BEGIN + script.replace("\n    ", "\n"), world_size=2)
    for told, own in zip(first, second):
        assert told == f"rank 1: {own}"
        assert own.startswith("cannot write ")
        assert own.endswith("No space left on device")
