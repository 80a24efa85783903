"""Cards are locked by names of sockets, however long those of host and cards are."""

from __future__ import annotations

import os

import pytest

from exp.errors import UnavailableError
from exp.hardware.registry import create_backend
from exp.launcher import job
from exp.launcher.job import locked_cards

CARDS = [f"GPU-{number}-{'0123456789' * 6}" for number in range(3)]


def test_cards_with_long_names_are_locked_one_by_one(monkeypatch):
    three = create_backend({"_target_": "cuda", "name": "cuda"})
    monkeypatch.setattr(three, "device_count", lambda: 3)
    monkeypatch.setattr(job, "this_host", lambda: "node." + "a" * 59)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(CARDS))
    with locked_cards(three, 2):
        assert os.environ["CUDA_VISIBLE_DEVICES"].split(",") == CARDS[:2]
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(CARDS))
        with pytest.raises(UnavailableError, match="has 1 of 3 cuda cards"), locked_cards(three, 2):
            pass
        with locked_cards(three, 1):
            assert os.environ["CUDA_VISIBLE_DEVICES"] == CARDS[2]
