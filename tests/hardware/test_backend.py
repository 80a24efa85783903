"""The backend interface stays one page, and says "cannot" where nobody says otherwise."""

from __future__ import annotations

from dataclasses import fields

import torch

from exp.hardware.backend import Backend, Capabilities, Collectives, device_backend


class Plain(Backend):
    device_type = "plain"
    collectives = Collectives("cpu:gloo,plain:lib")

    def unavailable_reason(self):
        return None

    def device_count(self):
        return 1


def test_a_backend_has_at_most_25_members():
    members = {*vars(Backend), *Backend.__annotations__}
    assert len([name for name in members if not name.startswith("_")]) <= 25


def test_what_nobody_says_a_card_cannot():
    plain = Plain(name="plain")
    assert [plain.supports(name) for name in ("fp32", "bf16")] == [True, False]
    assert not any(getattr(Capabilities(), field.name) for field in fields(Capabilities)[1:])
    assert not any((plain.collectives.averages, plain.collectives.gloo))
    assert [plain.usage(), plain.monitor(), plain.packages(), plain.warnings()] == [{}, [], {}, []]


def test_the_process_group_is_that_of_the_configuration_the_variable_or_the_backend(monkeypatch):
    assert Plain(name="plain").process_group() == "cpu:gloo,plain:lib"
    monkeypatch.setenv("TORCH_DISTRIBUTED_BACKEND", "gloo")
    assert Plain(name="plain").process_group() == "gloo"
    assert Plain(name="plain", process_group="mine").process_group() == "mine"


def test_the_devices_part_of_a_composite_group():
    assert [device_backend("cpu:gloo,x:y", name) for name in ("x", "z")] == ["y", "gloo"]
    assert device_backend("eccl", "x") == "eccl"


def test_ddp_is_told_the_card_of_its_rank():
    plain = Plain(name="plain")
    assert plain.ddp_kwargs(torch.device("cuda", 3)) == {"device_ids": [3], "output_device": 3}
    assert plain.ddp_kwargs(torch.device("cpu")) == {}
