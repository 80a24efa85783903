"""task=export: write a trained model as files for other programs, and compare the output of each with the model's."""

from __future__ import annotations

import importlib.util
import keyword
import logging
import math
import shutil
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Mapping, NamedTuple

import torch
from torch import nn

from exp.data.base import split_of
from exp.data.extensions import Units
from exp.data.loader import make_loader
from exp.engine.build import build_data, build_model
from exp.engine.result import make_result
from exp.errors import ConfigError, RunError, UnavailableError, first_line, qualified_name
from exp.hardware.compat import supports_export
from exp.runs.files import write_json

if TYPE_CHECKING:
    from exp.session import Session

_ONNX_PACKAGES = ("onnx", "onnxscript")
_MAX_ONNX_BYTES = 2**31 - 2**20  # of one file of Protocol Buffers, with room for the graph
_Batch = Dict[str, torch.Tensor]


class _Example(NamedTuple):
    """A batch to compare with.

    Attributes:
        inputs: in units of the files.
        expected: the model's output, in its own units.
    """

    inputs: _Batch
    expected: torch.Tensor


class _Program(nn.Module):
    """A model in mode ``tensor`` that takes and gives values in units of the files.

    Args:
        model: the model to export.
        units: of the keys of a batch, and of the output.
    """

    def __init__(self, model: nn.Module, units: Mapping[str, Units]) -> None:
        super().__init__()
        self.model, self.units = model, units
        for key, unit in units.items():
            if unit.scale is not None:
                self.register_buffer(f"{key}_offset", torch.as_tensor(unit.offset).float())
                self.register_buffer(f"{key}_scale", torch.as_tensor(unit.scale).float())

    def compute(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The output for named inputs; both in units of the files."""
        output: torch.Tensor = self.model(**{k: self._to_model(k, v) for k, v in inputs.items()}, mode="tensor")
        offset, scale = self._buffers_of("output")
        return output if scale is None else output * scale + offset

    def _buffers_of(self, key: str) -> tuple[Any, Any]:
        return getattr(self, f"{key}_offset", None), getattr(self, f"{key}_scale", None)

    def _to_model(self, key: str, values: torch.Tensor) -> torch.Tensor:
        offset, scale = self._buffers_of(key)
        if scale is None:
            return values
        values = (values.float() - offset) / scale
        limits = self.units[key].limits
        return values if limits is None else values.clamp(*limits)

    def example(self, batch: _Batch) -> _Example:
        """A batch in the model's units, with the output of the model as it is now."""
        expected = self.model(**batch, mode="tensor")
        return _Example({key: self._unit(key).to_file(value) for key, value in batch.items()}, expected)

    def difference(self, run: Callable[..., torch.Tensor], example: _Example) -> float:
        """The difference of a written program's output, in the model's units: large offsets must not hide it."""
        return relative_difference(self._unit("output").to_model(run(**example.inputs)), example.expected)

    def _unit(self, key: str) -> Units:
        return self.units.get(key, Units())


def _program_class(keys: list[str]) -> type[_Program]:
    """The class of a program whose arguments have these names: torch reads them from the signature of ``forward``."""
    wrong = [key for key in keys if not key.isidentifier() or keyword.iskeyword(key)]
    if wrong:
        raise ConfigError(f"task=export: keys of a batch must be names, as the arguments of a function: {wrong[0]!r}")
    scope: dict[str, Any] = {}
    arguments = ", ".join(keys)
    # The names are checked above.
    exec(f"def forward(self, {arguments}): return self.compute(dict(zip({keys}, ({arguments},))))", scope)  # noqa: S102
    return type("Program", (_Program,), {"forward": scope["forward"]})


class _FixedShapes(torch.jit.ScriptModule):
    """A traced program that refuses shapes and types that it was not traced or compared with, instead of guessing.

    Args:
        program: result of ``torch.jit.trace``.
        examples: their shapes and types are those that it takes; of any batch size, if theirs differ.
    """

    def __init__(self, program: Any, examples: list[_Example]) -> None:
        super().__init__()
        self.program = program
        first = examples[0].inputs
        begin = int(len(examples) > 1)
        lines = [f"def forward(self, {', '.join(first)}):"]
        for name, value in first.items():
            shape, kinds = list(value.shape[begin:]), {example.inputs[name].dtype for example in examples}
            wrong = [f"{name}.dim() != {value.dim()}", " and ".join(f"{name}.dtype != {kind}" for kind in kinds)]
            wrong += [f"list({name}.shape[{begin}:]) != {shape}"] if shape else []
            lines.append(f"    if {' or '.join(wrong)}:")
            lines.append(f'        raise ValueError("{name} has another shape or type than in export.json")')
        self.define("\n".join([*lines, f"    return self.program({', '.join(first)})", ""]))


def export(session: Session) -> dict[str, Any]:
    """Write ``export/`` in the run folder, in the formats of ``task.formats``; low-rank updates are merged.

    Programs are the model in mode ``tensor``. Their arguments are the tensors of a batch that the model needs, by their
    names, with values as files have them (:attr:`exp.data.extensions.DataExtensions.units`), and so is the output. A
    model may have ``export_batches(config)``, ``merge_updates()`` and ``write_huggingface(folder, batch, say)``.
    ``export.json`` describes inputs and output. All is computed on the CPU in float32, for any backend.

    Raises:
        ConfigError: the model cannot be written in a format that is named, or in none.
        UnavailableError: a package is missing for a format that is named.
        RunError: outputs of a written file differ from the model's by more than ``task.tolerance``.
    """
    task = session.config.task
    data: Any = build_data(session)
    model: Any = build_model(session, data).eval()
    for name in task.formats or ():
        _check_available(name, model)
    with torch.no_grad():
        batches = _batches(session, model, data)
        units = session.extensions.units() if session.extensions.units else {}
        program = _program_class(list(batches[0]))(model, units).eval()
        examples = [program.example(batch) for batch in batches]
        session.start_run()
        folder = session.folder.path / "export"
        folder.mkdir(exist_ok=True)
        differences: dict[str, float] = {}
        if hasattr(model, "merge_updates"):
            model.merge_updates()
            differences["merging"] = relative_difference(program.example(batches[0]).expected, examples[0].expected)
        skipped: dict[str, str] = {}
        batch_sizes: dict[str, int | str] = {}
        for name in task.formats or _default_formats():
            try:
                _check_available(name, model)
                if name == "huggingface":
                    differences[name] = _write_backbone(model, folder / name, batches[0], session.print)
                else:
                    differences[name], batch_sizes[name] = _write_program(name, program, folder, examples)
            except (ConfigError, UnavailableError) as error:
                if task.formats:
                    raise
                skipped[name] = error.headline
                session.print(f"export: not written as {name}: {error.headline}")
    if skipped.keys() == set(_default_formats()):
        raise ConfigError(f"task=export: the model can be written in no format: {'; '.join(skipped.values())}")
    wrong = [f"{name} by {value:.2g}" for name, value in differences.items() if not value <= task.tolerance]
    if wrong:
        raise RunError(
            f"task=export: outputs differ from the model's: {', '.join(wrong)} of the largest output, more than "
            f"task.tolerance={task.tolerance:g}; do not use {folder}"
        )
    about = {
        "inputs": {key: _describe(value, units.get(key)) for key, value in examples[0].inputs.items()},
        "output": _describe(examples[0].expected, units.get("output")),
        "batch_size": batch_sizes,
        "checkpoint": str(session.weights.path) if session.weights else None,
        "differences": differences,
        "skipped": skipped,
    }
    write_json(folder / "export.json", about)
    files = sorted(path.relative_to(session.folder.path).as_posix() for path in folder.rglob("*") if path.is_file())
    metrics = {f"difference_{name}": value for name, value in differences.items()}
    return make_result(session, metrics, None, files=files, measured_on="export", published=None)


def _describe(value: torch.Tensor, units: Units | None) -> dict[str, Any]:
    description = {} if units is None else units.about
    return {"shape": ["B", *value.shape[1:]], "dtype": str(value.dtype)[len("torch.") :], **description}


def relative_difference(output: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest absolute difference, divided by the largest absolute value."""
    if output.shape != expected.shape:
        return float("inf")
    output, expected = output.float(), expected.float()
    return float((output - expected).abs().max() / expected.abs().max().clamp(min=1e-12))


def _batches(session: Session, model: Any, data: Any) -> list[_Batch]:
    """Batches of two, three and one samples, and more of other dtypes, with the tensors that the model needs."""
    if hasattr(model, "export_batches"):
        batches: list[_Batch] = model.export_batches(session.config)
        return batches
    if session.config.task.size is not None:
        raise ConfigError(f"task.size is for models of images, and this is {qualified_name(model)}; leave it out")
    dataset = split_of(data, "test", session.config.seed)
    numbers = [torch.tensor(row) % len(dataset) for row in ([0, 1], [0, 1, 2], [2])]
    loaded = list(make_loader(dataset, numbers, 0, session.config.seed))
    first = {key: value for key, value in loaded[0].items() if isinstance(value, torch.Tensor) and value.dim()}
    expected = _output(model, first)
    if not isinstance(expected, torch.Tensor):
        other = f"{type(expected).__name__}: {first_line(expected)}" if isinstance(expected, Exception) else ""
        raise ConfigError(
            f'task=export: {qualified_name(model)}.forward(mode="tensor") must give a tensor for the tensors of a '
            f"batch, {', '.join(first)}, and gives {other or type(expected).__name__}"
        )
    needed = dict(first)
    for key in first:  # the target, for example, is not
        rest = {name: value for name, value in needed.items() if name != key}
        output = _output(model, rest)
        if isinstance(output, torch.Tensor) and rest and relative_difference(output, expected) == 0:
            needed = rest
    return [{key: batch[key] for key in needed} for batch in loaded]


def _output(model: Any, batch: Mapping[str, torch.Tensor]) -> Any:
    """The output in mode ``tensor``, or the exception: a model may raise anything."""
    try:
        return model(**batch, mode="tensor")
    except Exception as error:  # noqa: BLE001
        return error


def _default_formats() -> list[str]:
    return ["huggingface", "torch_export" if supports_export() else "torchscript", "onnx"]


def _check_available(name: str, model: Any) -> None:
    """Raise a ConfigError or UnavailableError if a format cannot be written by this model or with these packages."""
    if name == "huggingface" and not hasattr(model, "write_huggingface"):
        raise ConfigError(f"task.formats=huggingface: {qualified_name(model)} has no method write_huggingface")
    if name in ("torch_export", "onnx") and not supports_export():
        raise ConfigError(f"task.formats={name} takes torch >= 2.5, and this is {torch.__version__}", "leave it out")
    missing = [package for package in _ONNX_PACKAGES if name == "onnx" and not importlib.util.find_spec(package)]
    if missing:
        raise UnavailableError(
            f"task.formats=onnx needs {' and '.join(missing)}", f"pip install {' '.join(_ONNX_PACKAGES)} onnxruntime"
        )


def _write_backbone(model: Any, folder: Path, batch: _Batch, say: Callable[[str], None]) -> float:
    folder.mkdir(exist_ok=True)
    try:
        difference: float = model.write_huggingface(folder, batch, say)
    except ConfigError:
        shutil.rmtree(str(folder))
        raise
    return difference


def _write_program(name: str, program: _Program, folder: Path, examples: list[_Example]) -> tuple[float, int | str]:
    """Write a program, read it again, and run it: for any batch size or, if the model permits no other, for one sample.

    Returns:
        The largest difference, and the batch size, ``"any"`` or 1.

    Raises:
        ConfigError: the model cannot be written in this format.
    """
    file, write = _WRITERS[name]
    path, reason = folder / file, ""
    kinds = [value.dtype for value in examples[0].inputs.values()]
    if name != "torchscript":  # the types of its inputs are fixed
        examples = [one for one in examples if [value.dtype for value in one.inputs.values()] == kinds]
    single = [example for example in examples if len(example.expected) == 1]
    for chosen in (examples, single[:1]):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # sizes become constants, as they are meant to
                run = write(program, path, chosen)
                difference = max(program.difference(run, example) for example in chosen)
            if math.isinf(difference):
                raise ConfigError("its output has another shape than the model's")
            return difference, "any" if len(chosen) > 1 else 1
        except Exception as error:  # noqa: BLE001 - torch's, or the model's
            reason = reason or first_line(error)
            path.unlink() if path.exists() else None
    raise ConfigError(f"{qualified_name(program.model)} cannot be written as {name}: {reason}")


def _write_torchscript(program: _Program, path: Path, examples: list[_Example]) -> Callable[..., torch.Tensor]:
    traced = torch.jit.trace(program, tuple(examples[0].inputs.values()), check_trace=False)
    _FixedShapes(traced, examples).save(str(path))
    loaded: Any = torch.jit.load(str(path))
    return loaded  # type: ignore[no-any-return]


def _record(program: _Program, examples: list[_Example]) -> Any:
    inputs = examples[0].inputs
    shapes = {key: {0: torch.export.Dim("batch", min=1)} for key in inputs} if len(examples) > 1 else None
    return torch.export.export(program, (), inputs, dynamic_shapes=shapes)


def _write_torch_export(program: _Program, path: Path, examples: list[_Example]) -> Callable[..., torch.Tensor]:
    torch.export.save(_record(program, examples), str(path))
    loaded: Any = torch.export.load(str(path)).module()
    return loaded  # type: ignore[no-any-return]


def _write_onnx(program: _Program, path: Path, examples: list[_Example]) -> Callable[..., torch.Tensor]:
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it names optional packages that it does without
    size = sum(tensor.numel() * tensor.element_size() for tensor in program.state_dict().values())
    torch.onnx.export(_record(program, examples), (), str(path), output_names=["output"], verbose=False,
                      external_data=size > _MAX_ONNX_BYTES)  # fmt: skip
    if importlib.util.find_spec("onnxruntime"):
        import onnxruntime

        runner = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    else:
        from onnx.reference import ReferenceEvaluator

        runner = ReferenceEvaluator(str(path))
    return lambda **inputs: torch.from_numpy(runner.run(None, {key: v.numpy() for key, v in inputs.items()})[0])


_Writer = Callable[[_Program, Path, List[_Example]], Callable[..., torch.Tensor]]
_WRITERS: dict[str, tuple[str, _Writer]] = {
    "torchscript": ("model.torchscript.pt", _write_torchscript),
    "torch_export": ("model.pt2", _write_torch_export),
    "onnx": ("model.onnx", _write_onnx),
}
