"""The lazy graph: what waits, what runs it, and what becomes of a loop that never ends its steps."""

from __future__ import annotations

from tests.simulators import needs_legacy_card

pytestmark = needs_legacy_card


def test_work_waits_until_it_is_needed(job):
    job("""
import torch, torch_gcu
from torch_gcu.simulator import pending, runs
x = torch.ones(3, device="xla")
assert pending() == 1
y = x + 1
z = y * 2
assert pending() == 3
assert z[1:].sum().item() == 8  # a read value runs what it needs, which was all of it but no tensor's own value
del z
assert pending() == 2  # nobody needs the product any more
y.cpu()
assert pending() == 1 and runs() > 0
x += 1
assert pending() == 2
torch_gcu.synchronize()  # waits for what runs; starts nothing
assert pending() == 2
torch_gcu.sync_lived_tensor()
assert pending() == 0
view = x[1:]
x.t(), x.view(3, 1)
assert pending() == 0  # a view computes nothing
view.mul_(2)
torch_gcu.unlazy([x])
assert pending() == 0 and x.tolist() == [2, 4, 4]
a, b = torch.ones(2, device="xla:0") + 1, torch.ones(2, device="xla:1") + 1
torch_gcu.sync_lived_tensor("xla:1")
assert pending() == 2  # the other card's
""")


def test_ending_a_step(job):
    job("""
import torch, torch_gcu
from torch_gcu.simulator import pending
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)).to("xla")
optimizer = torch.optim.Adam(model.parameters())
mean = torch.zeros((), device="xla")
def step(watched=False, **options):
    global mean
    loss = model(torch.ones(2, 4, device="xla")).square().sum()
    mean = mean + loss.detach()
    optimizer.zero_grad()
    loss.backward()
    return torch_gcu.optimizer_step(optimizer, extra_output=mean if watched else None, **options)
for _ in range(3):
    step()
    assert pending() == 0
sizes = []
for _ in range(3):  # with model=, only its tensors are run: the running mean's graph goes on growing
    step(model=model)
    optimizer.zero_grad(set_to_none=True)
    sizes.append(pending())
assert 0 < sizes[0] < sizes[1] < sizes[2], sizes
assert sizes[2] - sizes[1] == sizes[1] - sizes[0], sizes
step(model=model, watched=True)
optimizer.zero_grad(set_to_none=True)
assert pending() == 0, pending()
assert step(optimizer_args={"closure": lambda: 7}) == 7
""")


def test_a_loop_that_never_ends_its_steps_fails(job):
    script = """
import sys, torch, torch_gcu
model = torch.nn.Linear(4, 4).to("xla")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1000):
    loss = model(torch.ones(2, 4, device="xla")).square().sum()
    optimizer.zero_grad()
    loss.backward()
    if sys.argv[0].endswith("script.py") and {ends}:
        torch_gcu.optimizer_step(optimizer)
    else:
        optimizer.step()
print("went through")
"""
    assert "went through" in job(script.format(ends=True), SIM_GCU_GRAPH_LIMIT="300")[0]
    failing = "try:\n" + "".join(f"    {line}\n" for line in script.format(ends=False).strip().splitlines())
    failing += """except RuntimeError as error:
    assert "the lazy graph of this process has grown to 301 operations" in str(error), error
    assert "end every step with torch_gcu.optimizer_step" in str(error)
    print("failed at step", step)
"""
    (printed,) = job(failing, SIM_GCU_GRAPH_LIMIT="300")
    assert "failed at step" in printed
    assert "went through" not in printed
