"""What a backend of the user's gives is looked at before torch is imported, and its device where it is selected."""

from __future__ import annotations

import pytest
import torch
from exp.backends.cpu import CpuBackend

from exp.backend import Backend
from exp.config.backends import check_backend, selected_device
from exp.errors import ConfigError


class Acme(Backend):
    device_type, default_process_group = "cpu", "gloo"

    def why_unavailable(self):
        return None

    def device_count(self):
        return 4

    def set_device(self, local_rank):
        return torch.device("cpu")


@pytest.mark.parametrize(
    ("member", "value"),
    [
        ("device_count", lambda self: None),
        ("device_count", lambda self: 1 / 0),
        ("why_unavailable", lambda self: False),
        ("worker_env", lambda self, rank, size: {}),
        ("worker_env", lambda self, *_, **__: {"A": 1}),
        ("set_device", lambda self, rank: "cpu"),
        ("set_device", lambda self, rank: torch.device("meta")),
    ],
)
def test_a_member_of_another_form_is_one_line(member, value):
    broken = type("Broken", (Acme,), {member: value, "__module__": __name__})(name="acme")
    with pytest.raises(ConfigError, match=rf"^backend: {__name__}\.Broken\.{member}.*docs/add-a-backend.md$"):
        look_at(broken)


def look_at(backend):
    check_backend(backend)
    return selected_device(backend, 0)


def test_what_is_right_or_exps_own_passes():
    for backend in (Acme(name="acme"), CpuBackend(name="cpu")):
        assert look_at(backend).type == "cpu"
