"""What exp uses of its libraries that these do not promise is all in one table, CONTRIBUTING.md."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Iterator

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "CONTRIBUTING.md"
HEADING = "## Private interfaces of others\n"
UPSTREAM = ("torch", "mmengine", "mmcv", "hydra", "submitit", "omegaconf", "multiprocessing")
UNDOCUMENTED = re.compile(
    r"(hydra\.core\.(global_hydra|object_type|override_parser|utils)"
    r"|torch\.distributed\.(elastic\.rendezvous\.utils|launcher))\b"
)
"""Modules whose names look public and that no documentation describes, or only other parts of."""
PUBLIC = {"_exit", "_fields", "_replace", "_asdict"}  # documented, of os and of named tuples


def table() -> list[tuple[list[str], set[str]]]:
    """Of each row the places, and the parts of the names."""
    rows = [
        line.strip("|").split(" | ")
        for line in PAGE.read_text().partition(HEADING)[2].splitlines()
        if line.startswith("| `")
    ]
    quoted = [[re.findall(r"`([^`]+)`", cell) for cell in row[:2]] for row in rows]
    return [(places, {part for name in names for part in name.split(".")}) for names, places in quoted]


def is_private(name: str) -> bool:
    return bool(re.fullmatch(r"_(?!_)\w*(?<!_)", name)) and name not in PUBLIC


def uses(tree: ast.AST) -> Iterator[str]:
    """Private and undocumented names that stand in a module and that it does not give itself."""
    nodes = list(ast.walk(tree))
    own = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    own |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    own |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in UPSTREAM:
            for alias in node.names:
                if UNDOCUMENTED.match(f"{node.module}.{alias.name}"):
                    yield alias.name
                yield from filter(is_private, [*str(node.module).split("."), alias.name])
        elif isinstance(node, ast.Attribute) and getattr(node.value, "id", None) not in ("self", "cls"):
            yield from {node.attr} - own if is_private(node.attr) else ()


def test_the_source_uses_nothing_private_that_the_table_lacks():
    rows, lacking = table(), []
    for file in (file for folder in ("src", "backends") for file in sorted((ROOT / folder).rglob("*.py"))):
        place = file.relative_to(ROOT).as_posix()
        known = set().union(*(parts for places, parts in rows if place in places))
        lacking += [f"{place}: {name}" for name in uses(ast.parse(file.read_text())) if name not in known]
    assert lacking == [], f"use what is public, or give it a row in {PAGE.name}"
    assert [place for places, _ in rows for place in places if not (ROOT / place).is_file()] == []
