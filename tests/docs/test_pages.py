"""The documentation: links lead somewhere, keys are documented, and every command is tried."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from exp.config import schema
from exp.forecasting import keys as series
from exp.forecasting.timebridge import keys as timebridge
from exp.launcher.slurm import keys as slurm
from exp.vision import config as vision
from exp.vision import keys as models
from exp.vision.backbones import keys as backbones
from exp.vision.data import keys as images
from tests.docs.reader import ELSEWHERE, GROUPS, PAGES, ROOT, lines_of


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def test_every_page_is_in_the_readme():
    text = (ROOT / "README.md").read_text()
    pages = [page.relative_to(ROOT).as_posix() for page in (ROOT / "docs").rglob("*.md")]
    assert [page for page in pages if page not in text] == []
    assert len(pages) <= 40


def test_every_page_with_commands_is_tried():
    known = {name for names in [*GROUPS.values(), *ELSEWHERE.values()] for name in names}
    assert [test for test in ELSEWHERE if not (ROOT / test).is_file()] == []
    assert sorted(page.stem for page in PAGES if page.stem not in known and lines_of(page)) == []
    assert sum(len(lines_of(page)) for page in PAGES) > 50


@pytest.mark.parametrize("module", [schema, slurm, series, timebridge, vision, images, models, backbones])
def test_every_key_is_documented(module):
    """In a page, or in the schema: a text follows the key."""
    pages = " ".join(page.read_text() for page in PAGES)
    missing = []
    for cls in ast.parse(Path(module.__file__).read_text()).body:
        members = cls.body if isinstance(cls, ast.ClassDef) else []
        for member, after in zip(members, [*members[1:], None]):
            text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            if isinstance(member, ast.AnnAssign) and not text and not re.search(rf"\b{member.target.id}\b", pages):
                missing.append(f"{cls.name}.{member.target.id}")
    assert missing == []
