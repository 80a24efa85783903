"""What a backend of the user's gives is looked at before torch is imported, and its device where it is selected."""

from __future__ import annotations

import pytest
import torch
from exp.backends.cpu import CpuBackend

from exp.config.backends import check_backend, selected_device
from exp.errors import ConfigError


class Acme(CpuBackend):
    """The user's own, since it is of another module than exp's."""


def look_at(backend):
    check_backend(backend)
    return selected_device(backend, 0)


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


@pytest.mark.parametrize("kind", [Acme, CpuBackend])
def test_what_is_right_or_exps_own_passes(kind):
    assert look_at(kind(name="acme")).type == "cpu"
