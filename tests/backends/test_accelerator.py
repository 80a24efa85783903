"""backend=accelerator: whatever card torch.accelerator finds, here the simulated one and one that is hardly a card."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch

from exp.backends_registry import create_backend
from exp.errors import ConfigError
from tests.conftest import clean_environment
from tests.simulators import needs_current_card

# A plug-in in pure Python, as far as torch lets one be: a name, a device that can be selected, and nothing else.
HARDLY = """
from torch.utils import backend_registration
backend_registration._setup_privateuseone_for_python_backend("hardly")
"""
needs_python_plugins = pytest.mark.skipif(
    not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend")
    if hasattr(torch.utils, "backend_registration")
    else True,
    reason="this torch takes no plug-in that is written in Python alone",
)


@pytest.fixture(scope="module")
def cards():
    """What puts the simulated plug-in where torch finds it by itself, as an installed one is found."""
    import simulated_gcu
    from simulated_gcu.build import extension

    extension()
    return {"PYTHONPATH": str(simulated_gcu.path())}


@pytest.fixture
def asked(ranks):
    """What a process without torch finds out; all that it prints is the value of an expression, as JSON."""

    def ask(expression: str, before: str = "", **environment: str):
        script = textwrap.dedent(before) + f"\nprint(json.dumps({expression}))"
        return ranks(script, backend="accelerator", **environment)[0]

    return ask


ANSWERS = "[backend.why_unavailable(), backend.device_count(), backend.title]"


@pytest.mark.parametrize("options", [{"import": ["torch_x"]}, {"imports": "torch_x"}])
def test_a_mistyped_option_is_refused(options):
    with pytest.raises(ConfigError, match=r"backend\.options\.import"):
        create_backend({"_target_": "accelerator", "name": "accelerator", "options": options})


def test_without_a_plugin_there_is_none():
    backend = {"_target_": "accelerator", "name": "accelerator"}
    absent = create_backend({**backend, "options": {"imports": ["torch_nowhere"]}})
    assert create_backend(backend).why_unavailable() is not None
    assert absent.why_unavailable() is not None
    assert absent.device_count() == 0


@needs_current_card
def test_cards_are_counted_without_torch_in_the_asking_process(asked, cards):
    free = "assert backend.why_unavailable() is None and 'torch' not in sys.modules"
    title = "accelerator (gcu, through torch.accelerator)"
    assert asked(ANSWERS, free, **cards, TOPS_VISIBLE_DEVICES="5,6") == [None, 2, title]
    reason, count, _ = asked(ANSWERS, **cards, SIM_GCU_COUNT="0")
    assert count == 0
    assert "torch is built for gcu, but counts no card" in reason
    reason, count, title = asked(ANSWERS, **cards, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert count == 0
    assert title == "accelerator" + " (cuda, through torch.accelerator)" * torch.backends.cuda.is_built()
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps plug-ins from loading: unset it" in reason


@needs_current_card
def test_a_plugin_that_does_not_load_or_does_not_answer(asked, cards, tmp_path):
    package = tmp_path / "torch_acme.py"
    info = tmp_path / "torch_acme-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_acme\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\ntorch_acme = torch_acme:load\n")
    package.write_text("def load():\n    raise OSError('libacme.so.1: not found')\n")
    reason, count, _ = asked(ANSWERS, PYTHONPATH=str(tmp_path))
    assert count == 0
    assert "torch cannot tell its accelerator" in reason
    assert "torch_acme" in reason
    assert asked("backend.packages()", PYTHONPATH=str(tmp_path)) == {"torch_acme": "1.0"}
    hurry = "from exp.backends import _ask_torch; _ask_torch._TIMEOUT_S = 0.01"
    reason, count, _ = asked(ANSWERS, hurry, **cards)
    assert count == 0
    assert "no answer within 0.01 s" in reason


@needs_current_card
def test_a_card_is_asked_for_all_that_it_can_do(asked, cards):
    script = """
        import torch
        device = backend.set_device(3)
        assert str(device) == backend.device_type + ":3" and torch.accelerator.current_device_index() == 3
        before = backend.memory()["allocated"]
        held = torch.zeros(2**20, device=device)
        assert backend.memory()["allocated"] == before + 2**22 and backend.memory()["max_allocated"] >= before + 2**22
        free, total = backend.free_memory()
        assert free == total - before - 2**22 and backend.memory()["total"] == total
        backend.seed(7)
        state = backend.rng_state()
        first = torch.rand(4, device=device).cpu()
        backend.set_rng_state(state)
        assert state.device.type == "cpu" and torch.equal(first, torch.rand(4, device=device).cpu())
        assert [backend.supports(name) for name in ("fp32", "bf16", "fp16", "tf32")] == [True, True, True, False]
        with backend.autocast("bf16"):
            assert (torch.ones(2, 2, device=device) @ torch.ones(2, 2, device=device)).dtype == torch.bfloat16
        assert type(backend.grad_scaler("fp16")).__module__.startswith("torch_gcu") and not backend.grad_scaler("bf16")
        assert backend.process_group == "cpu:gloo,gcu:eccl" and backend.collectives_missing() is None
        assert backend.ddp_kwargs(device) == {"device_ids": [3], "output_device": 3}
        assert backend.cautions()[0].endswith("use backend=gcu")
        own = torch.gcu.get_device_properties
        torch.gcu.get_device_properties = lambda device_name=None: own(device_name)  # as one vendor calls it
        assert backend.describe(device)["memory"] == total
        backend.synchronize()
        described = backend.describe(device)
        assert described["memory"] == total and described["index"] == 3 and "card" not in described
        from exp.errors import UnavailableError
        try:
            backend.set_device(8)
        except UnavailableError as error:
            assert "local_rank 8 has no card: torch.accelerator counts 8" in str(error)
        else:
            raise AssertionError
    """
    assert asked("described['name']", script, **cards)


@needs_python_plugins
def test_a_device_that_can_do_next_to_nothing_is_told_as_it_is(asked, tmp_path):
    (tmp_path / "torch_hardly.py").write_text(HARDLY)
    script = """
        backend = create_backend({**named, "options": {"imports": ["torch_hardly"], "visible_variables": ["HARDLY"]}})
        assert backend.why_unavailable() is None and backend.device_count() == 1 and "torch" not in sys.modules
        assert backend.only([0], 1) == {"HARDLY": "a"} and "HARDLY" in backend.variables
        device = backend.set_device(0)
        backend.seed(1)
        backend.synchronize()
        found = [str(device), backend.describe(device), backend.memory(), backend.free_memory(), backend.rng_state()]
        found += [[name for name in ("fp32", "bf16", "fp16", "tf32") if backend.supports(name)]]
        from torch.distributed import HashStore
        from exp.engine.distributed import agree_on_fallback
        backend.allow_fallback = True
        found += [agree_on_fallback(backend, HashStore(), 0, 1)["reason"]]
    """
    named = "named = {'_target_': 'accelerator', 'name': 'accelerator'}\n"
    answers = asked(
        "[*found, backend.process_group]",
        named + textwrap.dedent(script),
        PYTHONPATH=str(tmp_path),
        HARDLY="a,b",
    )
    described = {"name": "hardly", "index": 0, "visible": "a"}
    missing = "rank 0: no package has registered collectives for hardly with torch (undefined)"
    assert answers == ["hardly:0", described, {}, None, None, ["fp32"], missing, "cpu:gloo,hardly:undefined"]


@needs_current_card
def test_what_the_vendor_does_at_exit_is_done(cards):
    script = (
        "import atexit, os\nfrom exp.backends_registry import create_backend\n"
        "backend = create_backend({'_target_': 'accelerator', 'name': 'accelerator'})\nbackend.set_device(0)\n"
        "atexit.register(print, 'shut down', flush=True)\nbackend.close()\nos._exit(0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env=clean_environment(**cards)
    )
    assert done.stdout == "shut down\n"
