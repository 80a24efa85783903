"""When two ranks have one card."""

from __future__ import annotations

import pytest

from exp.hardware.cards import identity, monitor_row, shared_cards

ZERO = "00000000-0000-0000-0000-000000000000"
A, B = "6fd0e7e5-1b0c-4d32-8f3c-0f2a6f1e9b11", "0e6a2f11-9a10-4a4e-a3b5-6a4a0c1c2d22"


def pairs(*devices):
    named = [{"host": "one", "device": "card:0", "index": 0, **device} for device in devices]
    return shared_cards(dict(enumerate(named)))


@pytest.mark.parametrize(
    ("first", "second", "one"),
    [
        ({"uuid": A}, {"uuid": f"GPU-{A.upper()}"}, True),
        ({"uuid": A}, {"uuid": B}, False),  # each sees one card, which is number 0 to it
        # All that both tell has to agree: two parts of one card, two virtual cards.
        ({"uuid": A, "bus_id": "0000:3b:00.0"}, {"uuid": A, "bus_id": "0000:5e:00.0"}, False),
        ({"uuid": A, "bus_id": "0000:3b:00.0"}, {"uuid": B, "bus_id": "0000:3b:00.0"}, False),
        ({"uuid": A, "serial": "S1"}, {"uuid": A, "serial": "S2"}, False),
        ({"uuid": A, "bus_id": "0000:3b:00.0"}, {"uuid": A, "bus_id": "00000000:3B:00.0"}, True),
        ({"uuid": A, "bus_id": "0000:3b:00.0"}, {"bus_id": "0000:3b:00.0"}, True),
        ({"uuid": A, "card": 1}, {"uuid": A, "card": 1, "index": 1}, True),
        # An address of zeros is none.
        ({"uuid": ZERO, "card": 0}, {"uuid": ZERO, "card": 1}, False),
        ({"uuid": ZERO, "card": 1}, {"uuid": ZERO, "card": 1}, True),
        ({"uuid": ZERO, "bus_id": "0000:03:00.0"}, {"uuid": ZERO, "bus_id": "0000:43:00.0"}, False),
        ({"uuid": ZERO, "bus_id": "0000:00:00.0"}, {"uuid": ZERO, "bus_id": "0000:00:00.0", "index": 1}, False),
        # Nothing known: only the same place in the same list of one host is one card.
        ({"index": 0}, {"index": 1}, False),
        ({"index": 0}, {"index": 0}, True),
        ({"index": 0, "visible": f"GPU-{A}"}, {"index": 0, "visible": f"GPU-{B}"}, False),
        ({"index": 0, "card": 3}, {"index": 0}, False),
        ({"index": 0, "device": "card:0"}, {"index": 0, "device": "other:0"}, False),
        ({"uuid": A}, {"uuid": A, "host": "two"}, False),
    ],
)  # fmt: skip
def test_two_cards_are_one_only_if_all_that_both_tell_agrees(first, second, one):
    assert pairs(first, second) == ([(0, 1)] if one else [])


def test_every_rank_is_paired_with_the_first_that_has_its_card():
    assert pairs({"card": 0}, {"card": 1}, {"card": 0}, {"card": 0}, {"card": 1}) == [(0, 2), (0, 3), (1, 4)]


def test_a_card_finds_its_reading_of_the_monitor():
    unknown = [{"index": index, "uuid": ZERO, "bus_id": f"0000:{index}3:00.0"} for index in (0, 4)]
    device = {"uuid": ZERO, "bus_id": "0000:43:00.0", "index": 1}
    assert monitor_row(device, unknown) is unknown[1]
    assert (identity(device), identity({"uuid": ZERO, "index": 2})) == ("0000:43:00.0", "card 2")
