"""What exp uses of torch, MMEngine, Hydra, submitit and OmegaConf that these do not promise: all of it is in one table,
and for each row of it a test says what is no longer as it was, and where that matters.
"""

from __future__ import annotations

import ast
import copy
import functools
import importlib.util
import inspect
import io
import multiprocessing.util
import re
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any, Callable, Iterator

import pytest
import submitit
import torch
import torch.distributed as dist
from hydra import initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType, Transformer
from hydra.core.utils import JobReturn, JobStatus, setup_globals
from mmengine.hooks import EMAHook
from mmengine.runner import Runner
from mmengine.visualization.vis_backend import BaseVisBackend
from omegaconf import DictConfig, OmegaConf

from exp import compat

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


def module_of(path: Path) -> str:
    inner = path.relative_to(ROOT).with_suffix("").parts
    parts = inner[1:] if inner[0] == "src" else ("exp", *inner)
    return ".".join(part for part in parts if part != "__init__")


class Module:
    """One file of the source."""

    def __init__(self, path: Path) -> None:
        self.path = path.relative_to(ROOT).as_posix()
        self.name = module_of(path)
        self.tree = ast.parse(path.read_text())
        self.imports: dict[str, str] = {}
        self.classes: dict[str, ast.ClassDef] = {}
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
                if isinstance(node, ast.ClassDef):
                    self.classes[node.name] = node
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


def modules() -> list[Module]:
    return [Module(path) for folder in ("src", "backends") for path in sorted((ROOT / folder).rglob("*.py"))]


@functools.lru_cache(maxsize=None)
def private_names_of(name: str) -> frozenset[str]:
    """Private names that an upstream class and its bases read, write or define."""
    module, _, attribute = name.rpartition(".")
    try:
        found: Any = getattr(importlib.import_module(module), attribute)
    except (ModuleNotFoundError, AttributeError):  # of a newer version than this one: seen in the lane of that
        return frozenset()
    names: set[str] = set()
    for cls in inspect.getmro(found) if inspect.isclass(found) else ():
        if cls.__module__.split(".")[0] in UPSTREAM:
            names.update(filter(is_private, vars(cls)))
            try:
                names.update(filter(is_private, re.findall(r"\bself\.(_\w+)", inspect.getsource(cls))))
            except (OSError, TypeError):  # written in C++
                continue
    return frozenset(names)


def inherited(module: Module, by_name: dict[str, Module]) -> Iterator[str]:
    """Private names that a class of ours touches and an upstream class below it, too: read, written or overridden."""

    def upstream(module: Module, node: ast.ClassDef) -> Iterator[str]:
        for base in node.bases:
            name = module.resolved(base)
            if name in module.classes:
                name = f"{module.name}.{name}"
            home, _, short = name.rpartition(".")
            if home in by_name and short in by_name[home].classes:
                yield from upstream(by_name[home], by_name[home].classes[short])
            elif name.split(".")[0] in UPSTREAM:
                yield name

    for node in module.classes.values():
        touched = {part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute) and
                   dotted(part.value) in ("self", "super()")}  # fmt: skip
        touched |= {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
        for base in upstream(module, node):
            yield from touched & private_names_of(base)


def all_uses() -> set[tuple[str, str]]:
    found = modules()
    by_name = {module.name: module for module in found}
    return {(module.path, name) for module in found for name in [*module.uses(), *inherited(module, by_name)]}


def test_the_source_uses_nothing_private_that_the_table_lacks_and_all_that_it_has():
    uses, rows = all_uses(), table()
    lacking = sorted(f"{place}: {name}" for place, name in uses if not any(row.covers(place, name) for row in rows))
    assert lacking == [], f"use what is public, or give it a row in {PAGE.name} and a test here"
    for row in rows:
        for place in row.places:
            if place.endswith(".py"):
                unused = not any(row.covers(*use) for use in uses if use[0] == place)
            else:
                unused = row.names[0].rpartition(".")[2] not in (ROOT / place).read_text()
            assert not unused, f"{place} no longer uses {row.names[0]}: remove it from its row in {PAGE.name}"
        for name in row.names:
            parts = {use for place, use in uses if place in row.places}
            unused = parts.isdisjoint(name.split(".")) and all(place.endswith(".py") for place in row.places)
            assert not unused, f"nothing uses {name} any more: remove it from {PAGE.name}"


def test_a_private_use_is_found(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    (tmp_path / "src" / "exp").mkdir(parents=True)
    (tmp_path / "backends").mkdir()
    (tmp_path / "src" / "exp" / "base.py").write_text(
        "import mmengine.hooks\n\nclass Ours(mmengine.hooks.ProfilerHook):\n    def _free(self): self._mine = 1\n"
    )
    (tmp_path / "backends" / "one.py").write_text(
        "import torch, os\nfrom hydra._internal import utils\nfrom hydra.core.utils import JobReturn\n"
        "from exp.base import Ours\n\n"
        "class Mine(Ours):\n    def after_run(self, runner):\n        self._closed = self._mine = True\n"
        "    def _parse_trace_config(self, runner): ...\n"
        "def use(runner, mine):\n    os._exit(mine._mine)\n    return runner._hooks, torch._C.x, "
        "getattr(runner, '_seed'), 'torch._inductor.config', mine._replace()\n"
    )
    names = ["JobReturn", "_C", "_closed", "_hooks", "_inductor", "_internal", "_parse_trace_config", "_seed"]
    assert sorted(all_uses()) == [("backends/one.py", name) for name in names]


# -- what upstream still has ------------------------------------------------------------------------------------------


CHECKS: dict[str, Callable[[], object]] = {}


def check(function: Callable[[], object]) -> Callable[[], object]:
    """A check of the row that its docstring names."""
    CHECKS[str(function.__doc__)] = function
    return function


@check
def _() -> None:
    """mmengine.runner.Runner._timestamp"""
    source = inspect.getsource(Runner.__init__)
    assert source.index("self.setup_env(") < source.index("_{self._timestamp}"), "set by setup_env, then read"
    assert "self._timestamp = " in inspect.getsource(Runner.setup_env)
    assert "osp.join(self.work_dir, self.timestamp)" in source


@check
def _() -> None:
    """mmengine.runner.Runner._log_env"""
    assert "self._log_env(env_cfg)" in inspect.getsource(Runner.__init__)
    assert list(inspect.signature(Runner._log_env).parameters) == ["self", "env_cfg"]


@check
def _() -> None:
    """mmengine.runner.Runner._init_model_weights"""
    source = inspect.getsource(Runner.train)
    assert source.index("self._init_model_weights()") < source.index("self.load_or_resume()")


@check
def _() -> None:
    """mmengine.runner.Runner._train_dataloader"""
    for name in ("train", "val", "test"):
        assert f"self._{name}_dataloader = {name}_dataloader" in inspect.getsource(Runner.__init__)
        assert f"dataloader=self._{name}_dataloader" in inspect.getsource(getattr(Runner, f"build_{name}_loop"))


@check
def _() -> None:
    """mmengine.runner.Runner._resume"""
    assert "self._resume = resume" in inspect.getsource(Runner.__init__)
    assert "runner._resume" in inspect.getsource(EMAHook.after_load_checkpoint)


@check
def _() -> None:
    """mmengine.visualization.BaseVisBackend._init_env"""
    assert BaseVisBackend._init_env.__isabstractmethod__


@check
def _() -> None:
    """torch._C._functorch"""
    if compat.TORCH_VERSION >= (2, 0):
        seen: list[bool] = []
        torch.func.vmap(lambda x: (seen.append(compat.is_transformed(x)), x)[1])(torch.ones(2))
        assert seen == [True]
    assert not compat.is_transformed(torch.ones(2))


@check
def _() -> None:
    """torch.utils._python_dispatch"""
    seen: list[str] = []

    def call(func: Any, args: Any, kwargs: Any) -> Any:
        seen.append(str(func))
        return func(*args, **kwargs) + 1

    weight = torch.ones(2, requires_grad=True)
    with compat.every_operator(call):
        result = weight.exp()
        result.backward(torch.ones(2))
    assert any("exp" in name for name in seen)
    assert any("mul" in name for name in seen), "the backward pass"
    assert result.tolist() == [pytest.approx(2.718281828 + 1)] * 2


@check
def _() -> None:
    """torch.ops.aten.add_.Tensor._schema"""
    if compat.TORCH_VERSION >= (2, 0):
        assert torch.ops.aten.add_.Tensor._schema.is_mutable
        (view,) = torch.ops.aten.view.default._schema.returns
        assert view.alias_info is not None
        assert not view.alias_info.is_write


@check
def _() -> None:
    """torch._C._distributed_c10d._create_work_from_future"""
    if compat.TORCH_VERSION >= (2, 0):
        from torch._C._distributed_c10d import _create_work_from_future

        future: Any = torch.futures.Future()
        future.set_result([torch.ones(1)])
        assert _create_work_from_future(future).wait()


@check
def _() -> None:
    """torch.distributed.ProcessGroupGloo"""
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=60))
    options, tensor = dist.AllreduceOptions(), torch.ones(2)
    options.reduceOp = dist.ReduceOp.SUM
    group.allreduce([tensor], options).wait()
    assert tensor.tolist() == [1.0, 1.0]
    assert issubclass(dist.ProcessGroupGloo, dist.ProcessGroup) or compat.TORCH_VERSION >= (2, 0)


@check
def _() -> None:
    """torch.autograd.Variable._execution_engine"""
    weight, seen = torch.ones(1, requires_grad=True), []
    engine = torch.autograd.Variable._execution_engine
    weight.register_hook(lambda _: engine.queue_callback(lambda: seen.append(weight.grad.item())))
    (3 * weight).sum().backward()
    assert seen == [3.0], "called once, when gradients are in place"


@check
def _() -> None:
    """torch.nn.Module._load_from_state_dict"""

    class Old(torch.nn.Linear):
        def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
            state_dict.setdefault(f"{prefix}bias", torch.full((1,), 5.0))
            super()._load_from_state_dict(state_dict, prefix, *args)

    model = torch.nn.Sequential(Old(1, 1))
    model.load_state_dict({"0.weight": torch.ones(1, 1)})
    assert model[0].bias.item() == 5.0


@check
def _() -> None:
    """torch._utils._rebuild_tensor_v2"""
    file = io.BytesIO()
    torch.save({"tensor": torch.ones(2), "parameter": torch.nn.Parameter(torch.ones(2))}, file)
    for name in (b"torch._utils", b"_rebuild_tensor_v2", b"_rebuild_parameter"):
        assert name in file.getvalue()


@check
def _() -> None:
    """torch._dynamo"""
    assert compat.TORCH_VERSION < (2, 0) or importlib.util.find_spec("torch._dynamo") is not None


@check
def _() -> None:
    """torch._inductor.config"""
    if compat.supports_compilation():
        config = importlib.import_module("torch._inductor.config")
        assert isinstance(config.compile_threads, (int, type(None)))


@check
def _() -> None:
    """torch.distributed.launcher.api.LaunchConfig"""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    known = set(inspect.signature(LaunchConfig).parameters)
    assert known >= {"min_nodes", "max_nodes", "nproc_per_node", "run_id", "rdzv_backend", "rdzv_endpoint",
                     "rdzv_configs", "max_restarts", "monitor_interval", "start_method"}  # fmt: skip
    assert known & {"logs_specs", "log_dir"}
    assert list(inspect.signature(elastic_launch).parameters)[:2] == ["config", "entrypoint"]


@check
def _() -> None:
    """torch.distributed.elastic.rendezvous.utils.parse_rendezvous_endpoint"""
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    assert parse_rendezvous_endpoint("node7:29400", default_port=-1) == ("node7", 29400)


@check
def _() -> None:
    """hydra.core.override_parser.overrides_parser.OverridesParser"""
    parse = OverridesParser.create().parse_override
    plain, added, swept = parse("a.b={c: 1}"), parse("+a=1"), parse("a=1,2")
    assert (plain.key_or_group, plain.value(), plain.package, plain.type) == (
        "a.b",
        {"c": 1},
        None,
        OverrideType.CHANGE,
    )
    assert (plain.is_add(), plain.is_force_add(), plain.is_delete(), added.is_add()) == (False, False, False, True)
    assert swept.is_sweep_override()
    assert list(swept.sweep_iterator(Transformer.identity)) == [1, 2]
    assert isinstance(plain, Override)


@check
def _() -> None:
    """hydra.core.global_hydra.GlobalHydra"""
    with initialize_config_module("exp.conf", version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        parameters = list(inspect.signature(loader.load_configuration).parameters)
        assert parameters[:2] == ["config_name", "overrides"]
        assert "run_mode" in parameters
        assert list(inspect.signature(loader.get_group_options).parameters)[:2] == ["group_name", "results_filter"]


@check
def _() -> None:
    """hydra.core.object_type.ObjectType"""
    with initialize_config_module("exp.conf", version_base="1.3"):
        assert "cpu" in GlobalHydra.instance().config_loader().get_group_options("backend", ObjectType.CONFIG)


@check
def _() -> None:
    """hydra.core.utils.JobReturn"""
    returned = JobReturn(status=JobStatus.COMPLETED)
    returned.return_value = 0.5
    assert returned.return_value == 0.5
    setup_globals()


@check
def _() -> None:
    """omegaconf.Node._value"""
    config = OmegaConf.create({"a": "${b}", "b": "???", "c": [1]})
    assert [config._get_node(key)._value() for key in ("a", "b")] == ["${b}", "???"]
    assert [node._value() for node in config._get_node("c")._value()] == [1]


@check
def _() -> None:
    """omegaconf.DictConfig._get_node"""
    config = OmegaConf.create({"a": None, "b": "???", "c": {"d": 1}})
    config._set_flag("struct", True)
    children = [config._get_node(key) for key in ("a", "b", "c")]
    assert [child._is_none() for child in children] == [True, False, False]
    assert [child._is_missing() for child in children] == [False, True, False]


@check
def _() -> None:
    """omegaconf.DictConfig._content"""
    config = OmegaConf.create({"a": {"b": 3}, "c": "${a.b}", "d": [4]})
    node = config._content["c"]
    assert node._is_interpolation()
    assert node._get_root() is config
    assert node._dereference_node() is config._content["a"]._content["b"]
    assert [item._value() for item in config._content["d"]._content] == [4]
    assert DictConfig(None)._content is None


@check
def _() -> None:
    """submitit.SlurmExecutor._make_submission_file_text"""

    class Executor(submitit.SlurmExecutor):
        @classmethod
        def affinity(cls) -> int:
            return 1

    executor = Executor("logs")
    executor.update_parameters(job_name="shown", time=5)
    shown = copy.copy(executor)
    shown.parameters = {**executor.parameters, "map_count": 3}
    text = shown._make_submission_file_text(shown._submitit_command_str, "")
    assert "#SBATCH --job-name=shown" in text
    assert "#SBATCH --array=0-2" in text
    assert "submitit" in text.splitlines()[-1]


@check
def _() -> None:
    """submitit.slurm.slurm.SlurmJobEnvironment"""
    from submitit.core import plugins
    from submitit.slurm.slurm import SlurmJobEnvironment

    assert "job_environment" in inspect.getsource(plugins)
    assert type(plugins.get_job_environments()["slurm"]) is SlurmJobEnvironment


@check
def _() -> None:
    """atexit._run_exitfuncs"""
    script = "import atexit, os; atexit.register(print, 'once', flush=True); atexit._run_exitfuncs(); os._exit(0)"
    assert subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, check=True).stdout == b"once\n"


@check
def _() -> None:
    """multiprocessing.forkserver._forkserver"""
    from exp.launcher.fork_server import _can_be_forked

    assert _can_be_forked()


@check
def _() -> None:
    """multiprocessing.process.BaseProcess._config"""
    settings = multiprocessing.current_process()._config
    before = settings.get("tempdir")
    settings["tempdir"] = "/somewhere"
    try:
        assert multiprocessing.util.get_temp_dir() == "/somewhere"
    finally:
        settings["tempdir"] = before


@pytest.mark.parametrize("row", table(), ids=lambda row: row.names[0])
def test_upstream_is_as_the_table_has_it(row):
    library = row.names[0].split(".")[0]
    version = getattr(importlib.import_module(library), "__version__", "of this Python")
    problem = ""
    try:
        CHECKS[row.names[0]]()
    except Exception as error:  # noqa: BLE001 - whatever the change raises
        problem = f"{type(error).__name__}: {error}".splitlines()[0]
    if problem:
        words = f"{library} {version} is no longer as exp uses it: {row.names[0]}, in {', '.join(row.places)}"
        pytest.fail(f"{words} ({problem}); docs/{PAGE.name} says what for", pytrace=False)


def test_each_row_has_a_check_and_each_check_a_row():
    assert sorted(CHECKS) == sorted(row.names[0] for row in table())
