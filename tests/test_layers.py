"""The core knows no experiment, and experiments do not know each other."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Iterator

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


def modules() -> dict[str, set[str]]:
    """The modules of exp, each with those that it imports, also for typing and inside functions."""
    files = {path.relative_to(ROOT / "src").with_suffix("").parts: path for path in (ROOT / "src/exp").rglob("*.py")}
    names = {".".join(parts[:-1] if parts[-1] == "__init__" else parts): path for parts, path in files.items()}
    return {
        name: {other if other in names else other.rpartition(".")[0] for other in imported(path)} & {*names} - {"exp"}
        for name, path in names.items()
    }


def test_no_module_leads_back_to_itself():
    rest = modules()
    while True:
        free = [name for name, others in rest.items() if not (others - {name}) & {*rest}]
        if not free:
            break
        for name in free:
            del rest[name]
    assert sorted(rest) == [], "each of these imports another of them"


def test_a_package_imports_from_its_layer_and_lower_ones():
    page = (ROOT / "docs" / "concepts" / "architecture.md").read_text()
    layers = page.partition("Layers: ")[2].partition("\n")[0].split("<")
    layer = {name.strip(): number for number, names in enumerate(layers) for name in names.split(",")}
    package = {name: ([*name.split("."), "__init__"])[1] for name in modules()}
    assert {*package.values()} == {*layer}
    up = [
        f"{name} imports {other}"
        for name, others in modules().items()
        for other in others
        if layer[package[other]] > layer[package[name]]
    ]
    assert up == []


def test_every_package_is_in_the_wheel():
    listed = re.findall(
        r'"(exp[.\w]*)"', re.findall(r"\npackages = \[(.*?)\]", (ROOT / "pyproject.toml").read_text(), re.S)[0]
    )
    there = {
        ".".join(path.parent.relative_to(ROOT / "src").parts) for path in (ROOT / "src" / "exp").rglob("__init__.py")
    }
    assert there <= set(listed)
