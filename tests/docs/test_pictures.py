"""README's pictures are shown, and small."""

from __future__ import annotations

from tests.docs.reader import ROOT

PICTURES = ROOT / "docs" / "pictures"


def test_pictures_are_shown_and_small():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    files = sorted(PICTURES.iterdir())
    assert [file.name for file in files] == ["results.png", "run.svg"]
    for file in files:
        assert f"](docs/pictures/{file.name})" in readme
        assert file.stat().st_size < 200_000
