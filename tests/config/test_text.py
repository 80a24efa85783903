"""What a configuration is written down as, and its values, are what OmegaConf makes of it: byte for byte."""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, List, Optional, Union

import pytest
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from exp.config.text import to_yaml
from exp.config.walk import plain

STRINGS = [
    "", "a", "=", "/", "//", "-/", "a=", "a=b", "n/a", "y=", "_=1", "1/2", "/1", "e/", "a=true", "/tmp/a b", "=1",
    "/tmp/a.b-c", "/" + "x" * 300, "a/" * 60 + " b", "a=#", "a= b", "a: b", "é=1", "/a\n", "null", "true", "1e3", "~/x",
    "https://a/b", "a='b'", "%/a", "@a=b", "a=\\", "+a.b=c", "2001-01-01", "a=2001-01-01", "x=[1, 2]",
]  # fmt: skip
OTHERS = [0, -1, 10**30, True, False, None, 1.5, 1e-5, float("inf"), float("nan"), [], {}, [1, "a=b"], {"b": None}]


Typed = dataclasses.make_dataclass(
    "Typed",
    [("whole", int, 7), ("number", float, 0.5), ("text", str, "x"), ("maybe", Optional[int], None),
     ("either", Union[int, str], 3), ("numbers", List[int], dataclasses.field(default_factory=lambda: [1, 2])),
     ("names", Dict[str, Any], dataclasses.field(default_factory=dict))],
)  # fmt: skip


def test_members_and_lists_of_overrides():
    for key in ("seed", "on", "null", "a b"):
        for value in [*STRINGS, *OTHERS]:
            config = OmegaConf.create({key: value, "last": 1})
            assert to_yaml(config) == OmegaConf.to_yaml(config, resolve=True), (key, value)
    for overrides in ([], STRINGS, ["a=${b}"]):
        assert to_yaml(overrides) == OmegaConf.to_yaml(OmegaConf.create(overrides))


def test_values_that_others_give():
    content = {
        "same": {"whole": "${typed.whole}", "list": "${typed.numbers}", "item": "${typed.numbers[1]}"},
        "of": {"missing": "???", "null": None, 96: {"mse": 0.1}}, "all_of": "${of}", "missing": "???",
        "again": "${same.whole}", "none": "${typed.maybe}", "either": "${typed.either}",
        "in_text": "${typed.text}/${typed.whole}", "escaped": r"\${typed.text}", "relative": {"a": 1, "b": "${.a}"},
    }  # fmt: skip
    config = OmegaConf.create({"typed": OmegaConf.structured(Typed), **content})
    config.typed.number = "${typed.whole}"  # converted: 7.0
    config.typed.names = {"a": "${again}", "b": ["${typed.text}", "x"]}
    expected = OmegaConf.to_container(config, resolve=True)
    assert plain(config) == expected
    assert [*map(type, plain(config.typed).values())] == [*map(type, expected["typed"].values())]
    assert to_yaml(config) == OmegaConf.to_yaml(config, resolve=True)
    assert plain(config.same) == expected["same"], "absolute keys begin at the root"


@pytest.mark.parametrize(
    "value", ["${nonesuch}", "${a.b}", "${typed.text}", "${missing}", "${oc.env:NONESUCH_}", "${wrong}"]
)
def test_what_leads_nowhere_is_refused_in_the_same_words(value):
    config = OmegaConf.create({"typed": OmegaConf.structured(Typed), "missing": "???", "wrong": "${wrong}"})
    config.typed.whole = value
    said = []
    for write in (lambda config: OmegaConf.to_yaml(config, resolve=True), to_yaml):
        with pytest.raises((OmegaConfBaseException, RecursionError)) as caught:
            write(config)
        said.append(str(caught.value))
    assert said[0] == said[1]
