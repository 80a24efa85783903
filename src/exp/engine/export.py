"""task=export: write a trained model as files for other programs, and compare the output of each with the model's."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Dict, Mapping, Sequence

import torch
from torch import nn

from exp.data.base import split_of
from exp.data.loader import make_loader
from exp.engine.build import build_data, build_model
from exp.engine.result import make_result
from exp.errors import ConfigError, RunError, error_message, first_line, qualified_name
from exp.hardware.compat import supports_export
from exp.runs.files import write_json

if TYPE_CHECKING:
    from exp.session import Session

__all__ = ["export", "relative_difference"]

_DEFAULT_FORMATS = ("huggingface", "torchscript")
_Batch = Dict[str, torch.Tensor]


class _Positional(nn.Module):
    """A model in mode ``tensor``, with keys of the batch as its arguments.

    Args:
        model: the model to export.
        keys: of the batch, in the order of the arguments.
    """

    def __init__(self, model: nn.Module, keys: Sequence[str]) -> None:
        super().__init__()
        self.model, self.keys = model, list(keys)

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        """``model(<key>=<tensor>, ..., mode="tensor")``."""
        output: torch.Tensor = self.model(**dict(zip(self.keys, tensors)), mode="tensor")
        return output


class _FixedShapes(torch.jit.ScriptModule):
    """A recorded program with named arguments, which refuses shapes that it was not recorded with, instead of guessing.

    Args:
        program: result of ``torch.jit.trace``.
        batch: the tensors that it was recorded with.
    """

    def __init__(self, program: Any, batch: _Batch) -> None:
        super().__init__()
        self.program = program
        names = ", ".join(batch)
        lines = [f"def forward(self, {names}):"]
        for name, value in batch.items():
            shape, dims = list(value.shape[1:]), value.dim()
            wrong = f"{name}.dim() != {dims}" + (f" or list({name}.shape[1:]) != {shape}" if shape else "")
            lines += [
                f"    if {wrong}:",
                f'        raise ValueError("{name} must be (B, *{shape}), as in export.json")',
            ]
        self.define("\n".join([*lines, f"    return self.program({names})", ""]))


def export(session: Session) -> dict[str, Any]:
    """Write ``export/`` in the run folder, in the formats of ``task.formats``; low-rank updates are merged.

    ``model.torchscript.pt`` and ``model.pt2`` are the model in mode ``tensor``. Their arguments are the tensors of a
    batch that the model needs, by their names; batches have any size, and all else of a shape is as recorded. A model
    may have ``export_batches(config)``, ``describe_export(data, batch, formats)``, ``merge_updates()`` and
    ``write_huggingface(folder, batch, say)``. ``export.json`` describes
    inputs and output. All is computed on the CPU in float32, for any backend.

    Raises:
        ConfigError: the model cannot be written in a format that is named, or in none.
        RunError: outputs of a written file differ from the model's by more than ``task.tolerance``.
    """
    task = session.config.task
    data: Any = build_data(session)
    model: Any = build_model(session, data).eval()
    if task.formats and "huggingface" in task.formats and not hasattr(model, "write_huggingface"):
        raise ConfigError(f"task.formats=huggingface: {_no_huggingface(model)}")
    if task.formats and "torch_export" in task.formats and not supports_export():
        raise ConfigError(
            f"task.formats has torch_export, which takes torch >= 2.5, and this is {torch.__version__}; leave it out"
        )
    with torch.no_grad():
        batches = _batches(session, model, data)
        scores = _Positional(model, list(batches[0])).eval()
        expected = scores(*batches[0].values())
        session.start_run()
        folder = session.folder.path / "export"
        folder.mkdir(exist_ok=True)
        differences: dict[str, float] = {}
        if hasattr(model, "merge_updates"):
            model.merge_updates()
            differences["merging"] = relative_difference(scores(*batches[0].values()), expected)
        skipped: dict[str, str] = {}
        for name in task.formats or _DEFAULT_FORMATS:
            try:
                differences[name] = _WRITERS[name](session, scores, folder, batches)
            except ConfigError as error:
                if task.formats:
                    raise
                skipped[name] = error_message(error)
                session.print(f"export: not written as {name}: {skipped[name]}")
    written = [name for name in task.formats or _DEFAULT_FORMATS if name not in skipped]
    if not written:
        raise ConfigError(f"task=export: the model can be written in no format: {'; '.join(skipped.values())}")
    wrong = [f"{name} by {value:.2g}" for name, value in differences.items() if not value <= task.tolerance]
    if wrong:
        raise RunError(
            f"task=export: outputs differ from the model's: {', '.join(wrong)} of the largest output, more than "
            f"task.tolerance={task.tolerance:g}; do not use {folder}"
        )
    about = {
        "inputs": {key: _describe(value) for key, value in batches[0].items()},
        "output": _describe(expected),
        "checkpoint": str(session.weights.path) if session.weights else None,
        "differences": differences,
        "skipped": skipped,
        **(model.describe_export(data, batches[0], written) if hasattr(model, "describe_export") else {}),
    }
    write_json(folder / "export.json", about)
    files = sorted(path.relative_to(session.folder.path).as_posix() for path in folder.rglob("*") if path.is_file())
    metrics = {f"difference_{name}": value for name, value in differences.items()}
    return make_result(session, metrics, None, files=files, measured_on="export", published=None)


def _describe(value: torch.Tensor) -> dict[str, Any]:
    return {"shape": ["B", *value.shape[1:]], "dtype": str(value.dtype)[len("torch.") :]}


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
    odd = [key for key in needed if not key.isidentifier()]
    if odd:
        raise ConfigError(f"task=export: keys of a batch must be names, as the arguments of a function: {odd[0]!r}")
    return [{key: batch[key] for key in needed} for batch in loaded]


def _output(model: Any, batch: Mapping[str, torch.Tensor]) -> Any:
    """The output in mode ``tensor``, or the exception: a model may raise anything."""
    try:
        return model(**batch, mode="tensor")
    except Exception as error:  # noqa: BLE001
        return error


def _hugging_face(session: Session, scores: Any, folder: Path, batches: list[_Batch]) -> float:
    model, folder = scores.model, folder / "huggingface"
    if not hasattr(model, "write_huggingface"):
        raise ConfigError(_no_huggingface(model))
    folder.mkdir(exist_ok=True)
    try:
        difference: float = model.write_huggingface(folder, batches[0], session.print)
    except ConfigError:
        shutil.rmtree(str(folder))
        raise
    return difference


def _no_huggingface(model: Any) -> str:
    return f"{qualified_name(model)} has no method write_huggingface"


def _torch_script(_: Session, scores: Any, folder: Path, batches: list[_Batch]) -> float:
    path = str(folder / "model.torchscript.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # sizes become constants, as they are meant to
        try:
            traced: Any = torch.jit.trace(scores, tuple(batches[0].values()), check_trace=False)
            _FixedShapes(traced, batches[0]).save(path)
        except Exception as error:  # torch's, or the model's
            raise ConfigError(f"torch.jit.trace cannot record the model: {first_line(error)}") from error
        loaded: Any = torch.jit.load(path)
    return _max_difference(loaded, scores, batches)


def _torch_export(_: Session, scores: Any, folder: Path, batches: list[_Batch]) -> float:
    path, tensors = str(folder / "model.pt2"), tuple(batches[0].values())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # sizes become constants, as they are meant to
        batch = torch.export.Dim("batch", min=1)
        try:
            program = torch.export.export(scores, tensors, dynamic_shapes=(tuple({0: batch} for _ in tensors),))
        except Exception as error:  # torch's, or the model's
            raise ConfigError(f"torch.export cannot record the model: {first_line(error)}") from error
        torch.export.save(program, path)
        loaded: Any = torch.export.load(path).module()
    dtypes = [value.dtype for value in tensors]
    return _max_difference(loaded, scores, [b for b in batches if [value.dtype for value in b.values()] == dtypes])


_WRITERS: dict[str, Callable[[Any, Any, Path, list[_Batch]], float]] = {
    "huggingface": _hugging_face, "torchscript": _torch_script, "torch_export": _torch_export,
}  # fmt: skip


def _max_difference(loaded: Callable[..., torch.Tensor], scores: nn.Module, batches: list[_Batch]) -> float:
    """The largest difference over all batches; infinite if the program cannot run one of them."""
    differences = []
    for batch in batches:
        expected = scores(*batch.values())
        try:
            output = loaded(*batch.values())
        except Exception as error:  # a size that was recorded as a constant
            raise RunError(
                f"task=export: the written program fails with {len(next(iter(batch.values())))} samples: "
                f"{first_line(error)}"
            ) from error
        differences.append(relative_difference(output, expected))
    return max(differences)
