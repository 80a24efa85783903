"""Checkpoints of sharded models: written beside the training, by threads that need no collective."""

from __future__ import annotations

import pytest

from tests.engine.conftest import ON_DEVICES, needs_sharding
from tests.simulators import needs_current_card

pytestmark = needs_sharding

# A sharded model with layers of odd sizes, a frozen bias and buffers; ``save`` is what the checkpoint hook does.
BEGIN = """
import threading
from pathlib import Path
from exp.engine import checkpoint, sharded_files, sharded_save
from exp.engine.checkpoint_writer import CheckpointWriter
from exp.engine.fsdp import FullyShard
from exp.engine.optim import BackendOptimWrapper
from exp.errors import RunError

group = join()
torch.manual_seed(0)
layers = [nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)]
layers[0].bias.requires_grad_(False)
model = FullyShard().place(nn.Sequential(*layers), backend, device)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1, foreach=False)
optim = BackendOptimWrapper(optimizer, backend, "fp32", model=model)
writer = CheckpointWriter(backend)
saver = sharded_save.ShardedSaver(group, writer.closing)
folder = Path(os.path.realpath(folder)) / "checkpoints"

def step():
    optim.update_params(model(torch.arange(20.0).reshape(4, 5).to(device)).square().mean())

def content(prepare):
    found = {"meta": {"step": 1}, "state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}
    if prepare == saver.best:
        del found["optimizer"]
    return found

def save(path, prepare):
    part, write = prepare(path, content(prepare))
    writer.start({path: part}, optim, True, write=write)

def written():
    writer.wait()
    group.barrier()
"""
SAVE = """
def whole(value):
    if isinstance(value, dict):
        return {key: whole(each) for key, each in value.items()}
    if hasattr(value, "to_local"):
        return torch.cat(group.gather(value.to_local().detach().cpu()))
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value

go_on = threading.Event()
for function in ("write_part", "write_rows", "put_together"):
    def late(*arguments, inner=getattr(sharded_files, function)):
        assert go_on.wait(60)
        return inner(*arguments)
    setattr(sharded_files, function, late)
for file, prepare in (("step_00000001.pth", saver.training), ("best.pth", saver.best)):
    step()
    expected = whole(content(prepare))
    go_on.clear()
    save(folder / file, prepare)
    step()
    step()  # none of them waits for the files
    assert not (folder / file).exists()
    go_on.set()
    written()
    torch.testing.assert_close(checkpoint.read(folder / file), expected, rtol=0, atol=0)
    group.barrier()
end(sorted(path.name for path in folder.iterdir()))
"""


@pytest.mark.parametrize("backend", ["cpu", pytest.param("gcu", marks=needs_current_card)])
def test_the_state_at_the_call_is_written_while_training_goes_on(ranks, backend):
    files = ["best.pth", "best_00000001.safetensors", "step_00000001.pth", "step_00000001.shards0"]
    assert ranks(ON_DEVICES + BEGIN + SAVE, world_size=2, backend=backend) == [files, files]


FULL_DISK = """
path = folder / "step_00000001.pth"
save(path, saver.training)
written()
if rank == 1:
    def full(*_):
        raise OSError(28, "No space left on device")
    sharded_files.write_part = sharded_files.write_rows = full
found = []
for prepare in (saver.training, saver.best):
    save(path, prepare)
    try:
        writer.wait()
    except RunError as error:
        found.append(str(error))
    group.barrier()
checkpoint.read(path)
group.barrier()
end(found)
"""


def test_a_rank_that_cannot_write_is_named_and_the_former_checkpoint_stays(ranks):
    first, second = ranks(ON_DEVICES + BEGIN + FULL_DISK, world_size=2)
    assert ["No space left on device" in own for own in second] == [True, True]
    assert first == [f"rank 1: {own}" for own in second]
