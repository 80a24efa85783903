"""The core knows no experiment, and experiments do not know each other."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Iterator, Mapping

ROOT = Path(__file__).parents[1]
FAMILIES = ("forecasting", "vision")


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def crossings() -> Iterator[str]:
    """Imports, and paths in strings, that lead from the core into a family or from one family to the other."""
    package = ROOT / "src" / "exp"
    for path in [*package.rglob("*.py"), *(ROOT / "backends").glob("*.py")]:
        home = path.relative_to(ROOT).parts[2] if package in path.parents else "backends"
        others = [family for family in FAMILIES if family != home]
        strings = [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
        for name in [*imported(path), *(text for text in strings if isinstance(text, str))]:
            if any(f"exp.{family}" in name for family in others):
                yield f"{path.relative_to(ROOT)}: {name}"


def test_the_core_imports_no_experiment_and_experiments_not_each_other():
    assert list(crossings()) == []


def test_experiments_import_of_the_core_what_the_documentation_names():
    page = (ROOT / "docs" / "extend" / "add-a-task.md").read_text()
    table = page.partition("### What a package may import")[2].partition("## A launcher")[0]
    public = re.findall(r"`(exp\.[\w.]+)`", table)
    own = tuple(f"exp.{family}." for family in FAMILIES)
    files = [path for family in FAMILIES for path in (ROOT / "src" / "exp" / family).rglob("*.py")]
    used = {name for path in files for name in imported(path) if name.startswith("exp.") and not name.startswith(own)}
    assert {name for name in used if name.rpartition(".")[0] not in public} == set()
    assert [module for module in public if not any(name.startswith(f"{module}.") for name in used)] == []


def runtime_imports(node: ast.AST, names: Mapping[str, Path]) -> Iterator[str]:
    """Also those inside functions; not those of ``if TYPE_CHECKING``."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and getattr(child.test, "id", None) == "TYPE_CHECKING":
            continue
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom) and child.module:
            for alias in child.names:
                below = f"{child.module}.{alias.name}"
                yield below if below in names else child.module
        yield from runtime_imports(child, names)


def test_no_module_leads_back_to_itself():
    paths = {
        path: path.relative_to(ROOT / "src").with_suffix("").parts for path in (ROOT / "src" / "exp").rglob("*.py")
    }
    names = {".".join(parts[:-1] if parts[-1] == "__init__" else parts): path for path, parts in paths.items()}
    left = {name: {*runtime_imports(ast.parse(path.read_text()), names)} & {*names} for name, path in names.items()}
    del left["exp"]  # whose lazy members are the Python interface
    while True:
        free = [name for name, wanted in left.items() if not (wanted - {name}) & {*left}]
        if not free:
            break
        for name in free:
            del left[name]
    assert sorted(left) == [], "each of these imports another of them"


def test_every_package_is_in_the_wheel():
    listed = re.findall(
        r'"(exp[.\w]*)"', re.findall(r"\npackages = \[(.*?)\]", (ROOT / "pyproject.toml").read_text(), re.S)[0]
    )
    there = {
        ".".join(path.parent.relative_to(ROOT / "src").parts) for path in (ROOT / "src" / "exp").rglob("__init__.py")
    }
    assert there <= set(listed)
