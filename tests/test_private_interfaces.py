"""What exp uses of its libraries that these do not promise is all in one table, docs/private-interfaces.md."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Iterator

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "private-interfaces.md"
UPSTREAM = ("torch", "mmengine", "mmcv", "hydra", "submitit", "omegaconf", "multiprocessing")
UNDOCUMENTED = {
    "hydra.core.global_hydra",
    "hydra.core.object_type",
    "hydra.core.override_parser",
    "hydra.core.utils",
    "torch.distributed.elastic.rendezvous.utils",
    "torch.distributed.launcher",
}
"""Modules whose names look public and that no documentation describes, or only other parts of."""
PRIVATE_MODULE = re.compile(rf"({'|'.join(UPSTREAM)})(\.\w+)*\._[a-z]\w*(\.\w+)*")
UNDOCUMENTED_NAMES = {"AllreduceOptions", "ProcessGroupGloo"}
PUBLIC = {"_exit", "_fields", "_replace", "_asdict"}  # documented, of os and of named tuples


# -- the table --------------------------------------------------------------------------------------------------------


class Row:
    """One row: what is used, and where."""

    def __init__(self, cells: list[str]) -> None:
        self.names: list[str] = re.findall(r"`([^`]+)`", cells[0])
        self.places: list[str] = re.findall(r"`([^`]+)`", cells[1])
        self.parts = {part for name in self.names for part in name.split(".")}

    def covers(self, place: str, name: str) -> bool:
        return place in self.places and name in self.parts


def table() -> list[Row]:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    return [Row([cell.strip() for cell in line.strip("|").split(" | ")]) for line in lines]


# -- what the source uses ---------------------------------------------------------------------------------------------


def is_private(name: str) -> bool:
    return bool(re.fullmatch(r"_(?!_)\w*(?<!_)", name)) and name not in PUBLIC


def dotted(node: ast.AST) -> str:
    """``a.b().c`` of names, members and calls; what else there is shows as ``?``."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return f"{dotted(node.func)}()" if isinstance(node, ast.Call) else "?"


class Module:
    """One file of the source."""

    def __init__(self, path: Path) -> None:
        self.path = path.relative_to(ROOT).as_posix()
        self.tree = ast.parse(path.read_text())
        self.imports: dict[str, str] = {}
        self.own: set[str] = set()  # private names that it gives to objects of its own
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    first = alias.name.split(".")[0]
                    self.imports[alias.asname or first] = alias.name if alias.asname else first
            elif isinstance(node, ast.ImportFrom):
                self.imports.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
            elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                self.own.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                self.own.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and dotted(node.value) == "self":
                self.own.add(node.attr)

    def resolved(self, expression: ast.expr) -> str:
        """``nn.Module`` as ``torch.nn.Module``; what is no name stays as it is."""
        first, _, rest = dotted(expression).partition(".")
        first = first.partition("(")[0]
        return ".".join(filter(None, [self.imports.get(first, first), rest]))

    def uses(self) -> Iterator[str]:
        """Private and undocumented names that stand in it, but for those that a class inherits."""
        for node in ast.walk(self.tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                module = getattr(node, "module", None) or ""
                for alias in node.names:
                    name = f"{module}.{alias.name}".lstrip(".")
                    if name.split(".")[0] in UPSTREAM:
                        if any(f"{name}.".startswith(f"{known}.") for known in UNDOCUMENTED):
                            yield alias.name
                        yield from filter(is_private, name.split("."))
            elif isinstance(node, ast.Attribute):
                base = self.resolved(node.value)
                if node.attr in UNDOCUMENTED_NAMES and base.startswith(UPSTREAM):
                    yield node.attr
                if is_private(node.attr) and base.split(".")[0] not in ("self", "cls", "super"):
                    upstream = base.split(".")[0] in UPSTREAM
                    if upstream or (node.attr not in self.own and base.split(".")[0] not in ("exp", "os")):
                        yield node.attr
            elif isinstance(node, ast.Call) and dotted(node.func) in ("getattr", "hasattr", "setattr"):
                name = getattr(node.args[1], "value", None)
                if isinstance(name, str) and is_private(name) and name not in self.own:
                    yield name
            elif isinstance(node, ast.Constant) and PRIVATE_MODULE.fullmatch(str(node.value)):
                yield from filter(is_private, node.value.split("."))


def test_the_source_uses_nothing_private_that_the_table_lacks():
    rows = table()
    lacking = sorted(
        f"{module.path}: {name}"
        for folder in ("src", "backends")
        for module in (Module(path) for path in sorted((ROOT / folder).rglob("*.py")))
        for name in module.uses()
        if not any(row.covers(module.path, name) for row in rows)
    )
    assert lacking == [], f"use what is public, or give it a row in {PAGE.name}"
    gone = [place for row in rows for place in row.places if not (ROOT / place).is_file()]
    assert gone == [], f"rows of {PAGE.name} name files that are no more"
