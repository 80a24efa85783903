"""What the gcu backend says without any card; on simulated ones: test_accelerator, tests/simulators."""

from __future__ import annotations

import pytest
import torch

from tests.backends import made


def test_a_variable_that_nothing_reads_is_named(monkeypatch):
    monkeypatch.setenv("GCU_VISIBLE_DEVICES", "0,1")
    assert "GCU_VISIBLE_DEVICES=0,1" in made("gcu").warnings()[0]


@pytest.mark.skipif(torch.__version__.startswith("1."), reason="the current generation goes with torch >= 2.0")
def test_operators_are_counted_beside_what_the_user_asks_of_the_same_variable(monkeypatch):
    name = "ENFLAME_PT_OP_DEBUG_CONFIG"
    for asked in ("", "op_sync_mode=true"):
        monkeypatch.setenv(name, asked)
        assert made("gcu").run_env("fp32", True) == {name: f"{asked} op_statistics=true".strip()}
    monkeypatch.setenv(name, "op_statistics=true x=1")
    assert made("gcu").run_env("fp32", True) == {name: "op_statistics=true x=1"}
