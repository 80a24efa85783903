"""The gcu backend on the legacy generation; jobs on it are in tests/behaviour/test_simulated.py."""

from __future__ import annotations

from tests.simulators import needs_legacy_card

pytestmark = needs_legacy_card

BEGIN = """
import os, torch, torch_gcu
from exp.hardware.registry import create_backend
from exp.errors import ConfigError, UnavailableError
from tests.simulators.scripts import refused
def made(**settings):
    return create_backend({"_target_": "gcu", "name": "gcu", **settings})
"""


def test_what_its_card_can_do(card, tmp_path):
    script = """
assert (made().unavailable_reason(), made().device_count()) == (None, 8)  # the plug-in's word, of another process
backend = made(simulate=True)
device = backend.set_device(3)
assert (str(device), backend.collectives.process_group) == ("xla:3", "eccl")
assert backend.collectives.missing("eccl", "xla") is None
assert backend.collectives.ddp_class is torch_gcu.nn.parallel.DistributedDataParallel
assert backend.ddp_kwargs(device) == {"device_ids": [3], "output_device": 3}  # None: all cards, to the vendor's class
assert [backend.supports(precision) for precision in ("fp32", "bf16", "fp16")] == [True, False, False]
assert backend.device_info(device) == {"name": "T20 (simulated)", "index": 3, "card": 3}
refused(lambda: backend.set_device(8), UnavailableError, "local_rank 8")
mpi = lambda: backend.collectives.init("mpi", "xla", store=None, rank=0, world_size=1, timeout=None)
refused(mpi, ConfigError, "'mpi'")
assert [backend.run_env(name, True).get("ENFLAME_ENABLE_EFP") for name in ("efp", "fp32")] == ["true", None]
os.environ["ENFLAME_ENABLE_EFP"] = "true"
assert backend.supports("efp") and not backend.supports("fp32")
refused(lambda: backend.run_env("fp32", False), ConfigError, "ENFLAME_ENABLE_EFP=true")
backend.close()
os._exit(0)
"""
    card(BEGIN + script, SIM_GCU_EXIT_MARKS=str(tmp_path))
    assert not list(tmp_path.glob("*.unclean"))
    card("import os, torch_gcu\nos._exit(0)", SIM_GCU_EXIT_MARKS=str(tmp_path))  # without the vendor's clean-up
    assert len(list(tmp_path.glob("*.unclean"))) == 1


def test_a_step_ends_with_all_that_lives_or_with_the_model_alone(card):
    card(
        BEGIN
        + """
from torch_gcu.simulator import modes, pending
def waiting_after_a_step(backend):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)).to(backend.set_device(0))
    optimizer = torch.optim.Adam(model.parameters())
    mean = torch.ones(2, device="xla") + 1  # two operations, of what no model has
    loss = model(torch.ones(2, 4, device="xla")).sum()
    loss.backward()
    backend.end_step(optimizer, model=model, outputs=[loss])
    optimizer.zero_grad(set_to_none=True)
    return pending()
assert waiting_after_a_step(made(simulate=True)) == 0
assert waiting_after_a_step(made(simulate=True, options={"step": "model"})) == 2

backend = made(simulate=True, options={"step": "model"})
mean, outputs = torch.ones(2, device="xla"), {"logits": [torch.ones(2, device="xla"), torch.ones(1)], "size": 3}
before = modes()["SAFEASYNC"]
backend.end_batch(outputs)
assert (pending(), modes()["SAFEASYNC"] - before) == (1, 1)
for _ in range(31):
    backend.end_batch(outputs)
assert (pending(), modes()["SAFEASYNC"] - before) == (0, 32)  # what metrics add up is run now and then
refused(lambda: made(options={"step": "all"}), ConfigError, "backend.options.step=all")
"""
    )
