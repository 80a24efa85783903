"""Cards through torch: simulated ones by both backends that know them, and one that is hardly a card."""

from __future__ import annotations

import textwrap

import pytest

from exp.errors import ConfigError
from tests.backends import made
from tests.simulators import needs_current_card, plugin_on_path

ANSWERS = "[backend.unavailable_reason(), backend.device_count(), str(backend)]"


@pytest.fixture
def asked(ranks):
    """What a process without torch finds out; all that it prints is the value of an expression, as JSON."""

    def ask(expression: str, before: str = "", backend: str = "accelerator", **environment: str):
        script = textwrap.dedent(before) + f"\nprint(json.dumps({expression}))"
        return ranks(script, backend=backend, **environment)[0]

    return ask


def test_without_a_plugin_there_is_none_and_a_mistyped_option_is_refused():
    absent = made("accelerator", options={"imports": ["torch_nowhere"]})
    assert (absent.unavailable_reason() is None, absent.device_count()) == (False, 0)
    with pytest.raises(ConfigError, match=r"backend\.options\.import"):
        made("accelerator", options={"import": ["torch_x"]})


@needs_current_card
def test_cards_are_counted_without_torch_in_the_asking_process(asked):
    free = "assert backend.unavailable_reason() is None and 'torch' not in sys.modules"
    title = "accelerator (gcu, through torch.accelerator)"
    assert asked(ANSWERS, free, **plugin_on_path(), TOPS_VISIBLE_DEVICES="5,6") == [None, 2, title]
    for variable, named in (("SIM_GCU_COUNT", "built for gcu"), ("TORCH_DEVICE_BACKEND_AUTOLOAD", "AUTOLOAD=0")):
        reason, count, _ = asked(ANSWERS, **plugin_on_path(), **{variable: "0"})
        assert count == 0
        assert named in reason


@needs_current_card
def test_a_plugin_that_does_not_load_is_named(asked, tmp_path):
    info = tmp_path / "torch_acme-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_acme\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\ntorch_acme = torch_acme:load\n")
    (tmp_path / "torch_acme.py").write_text("def load():\n    raise OSError('libacme.so.1: not found')\n")
    answers = "[backend.unavailable_reason(), backend.device_count(), backend.packages()]"
    reason, *rest = asked(answers, PYTHONPATH=str(tmp_path))
    assert "torch_acme" in reason
    assert rest == [0, {"torch_acme": "1.0"}]


@needs_current_card
@pytest.mark.parametrize("name", ["accelerator", "gcu"])
def test_a_card_is_asked_for_all_that_it_can_do(asked, name):
    script = """
        import pytest, torch
        from exp.distributed import device_state
        from exp.errors import UnavailableError
        from exp.engine.optim import grad_scaler
        device = backend.set_device(3)
        assert str(device) == "gcu:3" == backend.device_type + ":3" and torch.accelerator.current_device_index() == 3
        before = backend.usage()["allocated"]
        held = torch.zeros(2**20, device=device)
        memory = backend.usage()
        assert memory["allocated"] == before + 2**22 and memory["max_allocated"] >= before + 2**22
        assert memory["free"] == memory["total"] - before - 2**22
        backend.torch_module.manual_seed_all(7)
        state = device_state(backend)
        first = torch.rand(4, device=device).cpu()
        backend.torch_module.set_rng_state(state)
        assert state.device.type == "cpu" and torch.equal(first, torch.rand(4, device=device).cpu())
        assert [backend.supports(name) for name in ("fp32", "bf16", "fp16", "tf32")] == [True, True, True, False]
        assert type(grad_scaler(backend, "fp16")).__module__.startswith("torch_gcu")
        assert grad_scaler(backend, "bf16") is None
        assert backend.collectives.process_group == "cpu:gloo,gcu:eccl"
        assert backend.collectives.missing("cpu:gloo,gcu:eccl", "gcu") is None
        own = torch.gcu.get_device_properties
        torch.gcu.get_device_properties = lambda device_name=None: own(device_name)  # as one vendor calls it
        described = backend.device_info(device)
        assert (described["memory"], described["index"]) == (memory["total"], 3)
        with pytest.raises(UnavailableError, match="local_rank 8"):
            backend.set_device(8)
    """
    assert asked("backend.name", script, name, **plugin_on_path()) == name
