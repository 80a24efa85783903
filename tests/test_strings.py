"""What the source names in a string must exist: no editor renames it, and a stale one fails late or not at all.

These tests read the source. They hold what is coupled by a string alone: paths of modules and files, attributes asked
for by ``getattr``, stages of hooks, environment variables, and keys of dictionaries.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
import re
from pathlib import Path
from typing import Any, Iterator

import mmengine.hooks
from mmengine.hooks import iter_timer_hook, runtime_info_hook

ROOT = Path(__file__).parents[1]
CODE = [path for folder in ("src", "backends") for path in sorted((ROOT / folder).rglob("*.py"))]
OTHERS = [*(ROOT / "simulators").rglob("*.py"), *(ROOT / "examples").rglob("*.py"), *(ROOT / "docs").glob("*.py")]
PACKAGES = {"exp": ROOT / "src" / "exp", "exp.backends": ROOT / "backends", "exp.conf": ROOT / "conf",
            "exp.sample_data": ROOT / "data", "tests": ROOT / "tests",
            "hydra_plugins": ROOT / "src" / "hydra_plugins"}  # fmt: skip


@functools.lru_cache(maxsize=None)
def tree(path: Path) -> ast.AST:
    return ast.parse(path.read_text())


@functools.lru_cache(maxsize=None)
def walk(path: Path) -> list[ast.AST]:
    return list(ast.walk(tree(path)))


@functools.lru_cache(maxsize=None)
def source_lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def nodes(kind: Any, paths: list[Path] | None = None) -> Iterator[tuple[Path, Any]]:
    for path in CODE if paths is None else paths:
        for node in walk(path):
            if isinstance(node, kind):
                yield path, node


def text(node: ast.AST | None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def where(path: Path, node: ast.AST) -> str:
    return f"{path.relative_to(ROOT)}:{node.lineno}"  # type: ignore[attr-defined]


@functools.lru_cache(maxsize=None)
def docstrings(path: Path) -> set[int]:
    """The strings that stand as statements, by identity."""
    return {id(node.value) for _, node in nodes(ast.Expr, [path])}


# -- dotted paths and files --------------------------------------------------------------------------------------------


def resolves(dotted: str) -> bool:
    """Whether a dotted path leads to a module, a file beside it, or what a module defines or imports."""
    names = dotted.split(".")
    home = next((n for n in (2, 1) if ".".join(names[:n]) in PACKAGES), 0)
    path, rest = PACKAGES[".".join(names[:home])], names[home:]
    while rest and (path / rest[0]).is_dir():
        path, rest = path / rest[0], rest[1:]
    if not rest:
        return True
    if (path / f"{rest[0]}.py").is_file():
        path, rest = path / f"{rest[0]}.py", rest[1:]
    elif (path / "__init__.py").is_file():
        path = path / "__init__.py"
    else:
        return False
    return not rest or (rest[0] in members(path) and (len(rest) < 2 or rest[1] in defined()))


@functools.lru_cache(maxsize=None)
def members(module: Path) -> set[str]:
    found = set()
    for node in walk(module):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


DOTTED = re.compile(r"(?<![\w./-])(?:exp|hydra_plugins)(?:\.[A-Za-z_]\w*)+")
NO_PATHS = {"exp.plugins", "exp.yaml", "exp.run", "exp.open_run", "exp.open_sweep", "exp.plain_pickle"}
"""An entry-point group, a file's name, the Python interface, and the name that pickles of plain values have."""


def test_dotted_paths_in_the_source_lead_somewhere():
    stale = []
    for path in [*CODE, *OTHERS]:
        for _, node in nodes(ast.Constant, [path]):
            for dotted in DOTTED.findall(node.value) if isinstance(node.value, str) else ():
                if dotted not in NO_PATHS and not dotted.endswith(".py") and not resolves(dotted):
                    stale.append(f"{where(path, node)}: {dotted}")
    assert stale == []


def test_dotted_paths_in_configuration_pages_and_build_files_lead_somewhere():
    files = [*(ROOT / "conf").rglob("*.yaml"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md"), ROOT / "Makefile",
             ROOT / "pyproject.toml", ROOT / "mkdocs.yml", *(ROOT / "benchmarks").glob("*.py"),
             *(ROOT / "examples").rglob("*.md"), *(ROOT / "examples").rglob("*.yaml")]  # fmt: skip
    stale = [
        f"{path.relative_to(ROOT)}: {dotted}"
        for path in files
        for dotted in DOTTED.findall(path.read_text())
        if dotted not in NO_PATHS and not dotted.endswith((".py", ".md")) and not resolves(dotted)
    ]
    assert stale == []


def test_files_of_the_repository_that_strings_name_exist():
    named = re.compile(r"(?<![\w./-])(?:docs|conf|src|backends|tests|benchmarks|examples|constraints)/[\w./-]*\w\.\w+")
    stale = [
        f"{where(path, node)}: {file}"
        for path in [*CODE, *OTHERS]
        for _, node in nodes(ast.Constant, [path])
        for file in (named.findall(node.value) if isinstance(node.value, str) else ())
        if not (ROOT / file).exists()
    ]
    assert stale == []


def test_modules_of_python_and_mmengine_that_strings_name_exist():
    """Those that the fork server imports, and the one by which a resource tracker's command line is recognized."""
    dotted = re.compile(r"(?:multiprocessing|mmengine)(?:\.\w+)+")
    values = {node.value for _, node in nodes(ast.Constant) if isinstance(node.value, (str, bytes))}
    texts = {value if isinstance(value, str) else value.decode("latin-1") for value in values}
    named = {value for value in texts if dotted.fullmatch(value)}
    assert [name for name in named if importlib.util.find_spec(name) is None] == []


def test_modules_that_pages_about_the_source_name_exist():
    files = [*CODE, *OTHERS, *(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").glob("*.py")]
    pages = [ROOT / "docs" / page for page in ("extend/change-exp.md", "extend/hooks.md", "concepts/architecture.md")]
    texts = [page.read_text() for page in [*pages, ROOT / "CONTRIBUTING.md"]]
    named = {name for page in texts for name in re.findall(r"`([\w/]+\.py)`", page)}
    assert [name for name in named if not any(f"/{file}".endswith(f"/{name}") for file in map(str, files))] == []


# -- attributes --------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=None)
def defined() -> frozenset[str]:
    """Names that a class, a function or an assignment of this repository gives."""
    names: set[str] = set()
    for _, node in nodes((ast.FunctionDef, ast.ClassDef, ast.Attribute, ast.AnnAssign, ast.Assign), [*CODE, *OTHERS]):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Attribute):
            names |= {node.attr} if isinstance(node.ctx, ast.Store) else set()
        else:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return frozenset(names)


# Attributes of others, which a version, a package or an object may lack.
FOREIGN_ATTRIBUTES = {
    "Python": {"__file__", "__func__", "__name__", "_fields", "orig_argv", "safe_path"},
    "torch": {
        "Stream", "TorchDispatchMode", "TorchFunctionMode", "_schema", "amp", "conv", "full_tensor", "gcnArchName",
        "get_backend_config", "inner_exception", "is_backend_available", "is_mutable", "set_device_index",
        "set_float32_matmul_precision", "static_graph", "to_local", "unshard", "variable",
    },
    "mmengine": {"data_preprocessor", "init_cfg", "need_val_args", "profiler"},
    "timm": {"output_fmt"},
    "torch_npu": {"_npu_shutdown"},
    "omegaconf, yaml, requests": {"CSafeLoader", "full_key", "parent_node", "response", "status_code"},
}  # fmt: skip


def test_attributes_asked_for_by_name_are_defined():
    foreign = set().union(*FOREIGN_ATTRIBUTES.values())
    asked = [
        (text(node.args[1]), where(path, node))
        for path, node in nodes(ast.Call)
        if getattr(node.func, "id", None) in ("getattr", "hasattr", "setattr") and len(node.args) > 1
    ]
    assert [each for each in asked if each[0] is not None and each[0] not in defined() | foreign] == []
    assert foreign - {name for name, _ in asked} == set(), "nobody asks for these any more"


def references() -> set[str]:
    """Names that are read, imported or stand in a string; ``__all__`` and docstrings do not count."""
    names: set[str] = set()
    for path in [*CODE, *OTHERS, *(ROOT / "benchmarks").glob("*.py")]:
        listed = {
            id(name)
            for _, node in nodes(ast.Assign, [path])
            if getattr(node.targets[0], "id", None) == "__all__"
            for name in getattr(node.value, "elts", ())
        }
        for _, node in nodes((ast.Name, ast.Attribute, ast.ImportFrom, ast.Constant), [path]):
            if isinstance(node, ast.ImportFrom):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.Constant):
                is_text = isinstance(node.value, str) and id(node) not in docstrings(path) | listed
                names |= set(re.findall(r"\w+", node.value)) if is_text else set()
            elif isinstance(node.ctx, ast.Load):
                names.add(node.id if isinstance(node, ast.Name) else node.attr)
    return names


FOREIGN_METHODS = {"_init_env", "is_group", "load_config", "manipulate_search_path", "on_broken_pipe"}
"""Methods that Hydra, MMEngine and rich call."""


def test_functions_and_classes_are_used_or_documented():
    """An override whose base was renamed is one that nobody calls."""
    pages = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "conf").rglob("*.yaml"), ROOT / "pyproject.toml"]
    used = references() | set(re.findall(r"\w+", " ".join(page.read_text() for page in pages)))
    unused = [
        f"{where(path, node)}: {node.name}"
        for path, node in nodes((ast.FunctionDef, ast.ClassDef))
        if not node.decorator_list  # what registers itself
        and (ROOT / "src" / "exp" / "hardware" / "operators") not in path.parents  # named as torch's operators
        and node.name not in used | FOREIGN_METHODS | set(mmengine.hooks.Hook.stages)
        and not node.name.startswith("__")
    ]
    assert unused == []


def documented(docstring: str, section: str) -> set[str]:
    """The names in a section of a docstring."""
    lines = re.search(rf"^{section}:\n((?: {{4}}.*\n?|\n(?= {{4}}))+)", docstring, re.MULTILINE)
    return set(re.findall(r"^ {4}\*{0,2}(\w+): ", lines[1], re.MULTILINE)) if lines else set()


def docstring_lines(node: Any, lines: list[str]) -> list[str]:
    has_docstring = ast.get_docstring(node) is not None
    return lines[node.body[0].lineno - 1 : node.body[0].end_lineno] if has_docstring else []


def test_what_docstrings_describe_exists():
    """Arguments and attributes of the same function or class, and what :meth:`...` and the like lead to."""
    stale = []
    known = defined() | references()
    for path, node in nodes((ast.FunctionDef, ast.ClassDef)):
        docstring = ast.get_docstring(node) or ""
        lines = source_lines(path)
        code = " ".join(lines[node.lineno - 1 : node.end_lineno]).replace(" ".join(docstring_lines(node, lines)), "")
        names = documented(docstring, "Args") | documented(docstring, "Attributes")
        links = {link.rpartition(".")[2] for link in re.findall(r":(?:meth|attr):`~?([\w.]+)`", docstring)}
        missing = [*(names - {*re.findall(r"\w+", code)}), *(link for link in links - known if link[:2] != "__")]
        stale += [f"{where(path, node)}: {name}" for name in missing]
    assert stale == []


def test_stages_that_are_called_are_those_that_hooks_have():
    called = set()
    for _, node in nodes(ast.Call):
        if getattr(node.func, "attr", None) == "call_hook":
            stage = node.args[0]
            if isinstance(stage, ast.JoinedStr):  # f"before_{stage}_epoch", in loops that evaluate
                parts = [text(part) for part in stage.values]
                called |= {"".join(part or split for part in parts) for split in ("val", "test")}
            else:
                called.add(text(stage))
    checkpoints = {"after_load_checkpoint", "before_save_checkpoint"}  # MMEngine does not list them
    assert called == {
        *mmengine.hooks.Hook.stages,
        *checkpoints,
        "before_validation",
        "before_clipping",
        "after_clipping",
    }
    asked = {node.value for _, node in nodes(ast.Constant) if re.fullmatch(r"(before|after)_\w+", str(node.value))}
    assert asked <= called, "user_hooks_overriding would find no hook"
    own = {
        name.name
        for _, node in nodes(ast.ClassDef)
        if any("Hook" in ast.dump(base) for base in node.bases)
        for name in node.body
        if isinstance(name, ast.FunctionDef) and name.name.startswith(("before_", "after_"))
    }
    assert own <= called


# -- environment variables, and keys of dictionaries -------------------------------------------------------------------


def test_environment_variables_of_exp_are_constants_that_both_sides_import():
    constants: dict[str, str] = {}
    for path, node in nodes(ast.Constant):
        if isinstance(node.value, str) and re.fullmatch(r"EXP_[A-Z_]+", node.value):
            (assigned,) = (
                each.targets[0].id for _, each in nodes(ast.Assign, [path]) if each.value is node
            )  # a variable in any other place would be renamed on one side
            assert constants.setdefault(node.value, assigned) == assigned
    assert constants
    read = [node.id for _, node in nodes(ast.Name) if isinstance(node.ctx, ast.Load)]
    assert [variable for variable, name in constants.items() if read.count(name) < 2] == []


def test_variables_of_exp_and_the_simulators_that_tests_and_pages_name_exist():
    variable = re.compile(r"\b(?:EXP|SIM)_[A-Z_]*[A-Z]\b")
    given = {node.value for _, node in nodes(ast.Constant, [*CODE, *OTHERS]) if variable.fullmatch(str(node.value))}
    for file in (ROOT / "simulators").rglob("*.cpp"):
        given |= set(re.findall(r'getenv\("(\w+)"', file.read_text()))
    pages = [page for folder in ("docs", "simulators") for page in (ROOT / folder).rglob("*.md")]
    files = [*pages, *(ROOT / "tests").rglob("*.py"), *CODE]
    assert {name for file in files for name in variable.findall(file.read_text())} - given == set()


def test_processes_are_looked_for_by_the_names_that_they_give_themselves():
    name = re.compile(r"(?<![\w/.-])exp-(?!accelerators|c10d|card|dataclasses|simulated)[a-z-]+")
    calls = [node.args[0] for _, node in nodes(ast.Call) if "name_process" in ast.dump(node.func)]
    given = {found for call in calls for part in ast.walk(call) for found in name.findall(text(part) or "")}
    files = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "tests").rglob("*.py"), *CODE]
    assert {found for file in files for found in name.findall(file.read_text())} == given


def test_keys_that_the_engine_puts_into_the_message_hub_are_not_taken_for_a_hooks_state():
    info = (node.value for _, node in nodes(ast.Assign) if getattr(node.targets[0], "id", "") == "_RUNTIME_INFO")
    own = ast.literal_eval(next(info))
    calls = [node for _, node in nodes(ast.Call) if getattr(node.func, "attr", "").startswith("update_info")]
    put = {text(key) for call in calls for key in getattr(call.args[0], "keys", call.args[:1])} - {None}
    theirs = inspect.getsource(runtime_info_hook) + inspect.getsource(iter_timer_hook)
    assert put <= own
    assert [key for key in own if not re.search(rf"\b{key}\b", theirs)] == []


# Keys that others write: files of other projects, the environment, and libraries.
FOREIGN_KEYS = {
    "Python, torch, mmengine": {"initial_lr", "end_factor", "runtime_info"},
    "devices": {"cpu"},
    "the kernel's amdgpu driver": {"domain", "location_id"},
    "files of weights": {"q", "license_name", "weight_map", "rope_parameters", "pretrained_cfg", "model_args"},
    "images": {"conversations", "image_path", "scale_factor"},
    "timm": {"fixed_input_size", "img_size", "input_size"},
}


def test_keys_that_are_read_are_written_somewhere():
    read: dict[str, str] = {}
    written: set[str] = set()
    for path, node in nodes((ast.Subscript, ast.Call, ast.Dict, ast.keyword)):
        if isinstance(node, ast.Subscript):
            key = text(getattr(node.slice, "value", node.slice) if isinstance(node.slice, ast.Index) else node.slice)
            if isinstance(node.ctx, ast.Load):
                read.setdefault(key or "", where(path, node))
            else:
                written.add(key or "")
        elif isinstance(node, ast.Dict):
            written |= {text(key) or "" for key in node.keys}
        elif isinstance(node, ast.keyword):
            written.add(node.arg or "")
        elif node.args and isinstance(node.func, ast.Attribute) and text(node.args[0]) is not None:
            if node.func.attr in ("get", "pop", "get_info"):
                read.setdefault(text(node.args[0]) or "", where(path, node))
            elif node.func.attr in ("setdefault", "update_info", "update_scalar", "set"):
                written.add(text(node.args[0]) or "")
    words = {key: place for key, place in read.items() if re.fullmatch(r"[a-z]\w*", key)}
    foreign = set().union(*FOREIGN_KEYS.values())
    assert {key: place for key, place in words.items() if key not in written | defined() | foreign} == {}
    assert foreign - set(words) == set(), "nobody reads these any more"
