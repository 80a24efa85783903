"""Cards are locked by names of sockets, however long those of host and cards are."""

from __future__ import annotations

import os

import pytest

from exp.backend import Backend
from exp.errors import UnavailableError
from exp.launcher import card_locks
from exp.launcher.card_locks import locked_cards

CARDS = [f"CARD-{number}-{'0123456789' * 6}" for number in range(3)]


def test_cards_with_long_names_are_locked_one_by_one(monkeypatch):
    class Three(Backend):
        visible_variables, exclusive_devices = ("THREE_VISIBLE",), True

        def device_count(self):
            return len(os.environ["THREE_VISIBLE"].split(","))

    Three.__abstractmethods__ = frozenset()
    monkeypatch.setattr(card_locks, "this_host", lambda: "node." + "a" * 59)
    monkeypatch.setenv("THREE_VISIBLE", ",".join(CARDS))
    three = Three("three")
    with locked_cards(three, 2):
        assert os.environ["THREE_VISIBLE"].split(",") == CARDS[:2]
        monkeypatch.setenv("THREE_VISIBLE", ",".join(CARDS))
        with pytest.raises(UnavailableError, match="has 1 of 3 three cards to spare, but nproc=2"), locked_cards(
            three, 2
        ):
            pass
        with locked_cards(three, 1):
            assert os.environ["THREE_VISIBLE"] == CARDS[2]
