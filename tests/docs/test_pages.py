"""The documentation: links lead somewhere, keys are documented, and every command is tried."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from tests.docs.reader import ELSEWHERE, GROUPS, PAGES, ROOT, lines_of


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def test_every_page_is_in_the_readme():
    text = (ROOT / "README.md").read_text()
    assert [page.name for page in (ROOT / "docs").glob("*.md") if f"docs/{page.name}" not in text] == []


def test_every_page_with_commands_is_tried():
    known = {name for names in GROUPS.values() for name in names} | set(ELSEWHERE)
    assert all((ROOT / test).is_file() for test in ELSEWHERE.values())
    assert sorted(page.stem for page in PAGES if page.stem not in known and lines_of(page)) == []
    assert sum(len(lines_of(page)) for page in PAGES) > 50


def test_every_key_is_documented():
    """In a page, in the schema beside the key, or in the docstring of the class that takes it."""
    from exp.config import schema
    from exp.forecasting import config as forecasting
    from exp.vision import config as vision

    pages = " ".join(page.read_text() for page in PAGES)
    missing = []
    for module in (schema, forecasting, vision):
        source = Path(module.__file__).read_text()
        for cls in vars(module).values():
            if not (dataclasses.is_dataclass(cls) and cls.__module__ == module.__name__):
                continue
            body = source.split(f"class {cls.__name__}")[1].split("\n@dataclass")[0]
            for field in dataclasses.fields(cls):
                if field.name.startswith("_") or not re.search(rf"\n    {field.name}: ", body):
                    continue  # an inherited one, which has its own words
                beside = re.search(rf'\n    {field.name}: .*(?:\n(?!    \w+: ).*)*?\n    """', body)
                if not beside and not re.search(rf"\b{field.name}\b", pages):
                    missing.append(f"{cls.__name__}.{field.name}")
    assert missing == []
