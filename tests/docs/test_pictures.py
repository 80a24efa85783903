"""README's pictures are those that docs/make_pictures.py draws, and small."""

from __future__ import annotations

import importlib.util
import xml.etree.ElementTree as ElementTree

from tests.docs.reader import ROOT

PICTURES = ROOT / "docs" / "pictures"


def test_the_diagram_is_that_of_the_script():
    spec = importlib.util.spec_from_file_location("make_pictures", ROOT / "docs" / "make_pictures.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    drawn = script.diagram()
    assert (PICTURES / "run.svg").read_text(encoding="utf-8") == drawn
    texts = {element.text for element in ElementTree.fromstring(drawn).iter("{http://www.w3.org/2000/svg}text")}
    assert {"Backend", "Data", "Launcher", "Logger", "Metric", "Model", "Task", "Wrapper"} <= texts


def test_pictures_are_shown_and_small():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    files = sorted(PICTURES.iterdir())
    assert [file.name for file in files] == ["results.png", "run.svg"]
    for file in files:
        assert f"](docs/pictures/{file.name})" in readme
        assert file.stat().st_size < 200_000
