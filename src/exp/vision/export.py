"""task=export: write a trained model as files for other programs, and compare the output of each with the model's."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Sequence

import torch
from safetensors.torch import load_file
from torch import nn

from exp.engine.build import build_data, build_model
from exp.engine.result import make_result
from exp.errors import ConfigError, RunError
from exp.hardware.compat import supports_export
from exp.runs.files import write_json

if TYPE_CHECKING:
    from exp.session import Session

__all__ = ["describe_input", "export", "relative_difference"]

_BATCH = 2  # size of the batch that a program is recorded with


class _LogitsModule(nn.Module):
    """The model in mode ``tensor``, with the image as its only argument.

    Args:
        model: the model to export.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """(B, C, H, W), 0..255 -> ``model(image=image, mode="tensor")``."""
        return self.model(image=image, mode="tensor")


class _FixedSize(nn.Module):
    """A recorded program that refuses images of another size than it was recorded with: results would be wrong.

    Args:
        program: result of ``torch.jit.trace``.
        image: the images that it was recorded with, (B, C, H, W).
    """

    def __init__(self, program: Any, image: torch.Tensor) -> None:
        super().__init__()
        self.program, self.shape = program, list(image.shape[1:])

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Check the size and run the program; only with operations that ``torch.jit.script`` can compile."""
        if list(image.shape[1:]) != self.shape:
            raise ValueError("images must be (B, C, H, W) of the size of export.json: cut them, or set task.size")
        result: torch.Tensor = self.program(image)
        return result


def export(session: Session) -> dict[str, Any]:
    """Write ``export/`` in the run folder, in the formats of ``task.formats``; low-rank updates are merged.

    ``huggingface/`` has the backbone. ``model.torchscript.pt`` and ``model.pt2`` have normalization, backbone and head:
    they take raw images (B, C, H, W), 0..255, of ``task.size`` pixels a side only, as float32 (TorchScript also as
    uint8). ``export.json`` describes input and output. All is computed on the CPU in float32, for any backend.

    Raises:
        ConfigError: the model has no backbone, or this torch or the backbone cannot write a format.
        RunError: outputs of a written file differ from the model's by more than ``task.tolerance``.
    """
    task = session.config.task
    if "torch_export" in task.formats and not supports_export():
        raise ConfigError(
            f"task.formats has torch_export, which takes torch >= 2.5, and this is {torch.__version__}; leave it out"
        )
    data: Any = build_data(session)
    model: Any = build_model(session, data).eval()
    if not hasattr(model, "merge_updates"):
        raise ConfigError(f"task=export: model {session.config.model._target_} has no backbone to export")
    side = task.size or int(session.config.data.size)
    # Not only whole numbers: files of more than 8 bits give fractions.
    image = torch.rand(_BATCH, data.read.channels, side, side) * 255.0
    session.start_run()
    folder = session.folder.path / "export"
    folder.mkdir(exist_ok=True)
    with torch.no_grad():
        expected = model(image=image, mode="tensor")
        model.merge_updates()
        differences = {"merging": relative_difference(model(image=image, mode="tensor"), expected)}
        for name in task.formats:
            differences[name] = _WRITERS[name](session, model, folder, image)
    wrong = [f"{name} by {value:.2g}" for name, value in differences.items() if not value <= task.tolerance]
    if wrong:
        raise RunError(
            f"task=export: outputs differ from the model's: {', '.join(wrong)} of the largest output, more than "
            f"task.tolerance={task.tolerance:g}; do not use {folder}"
        )
    dtypes = {name: "uint8 or float32" if name == "torchscript" else "float32" for name in task.formats}
    about = {
        "input": {"shape": ["B", *image.shape[1:]], **describe_input(data), "dtypes": dtypes},
        "output": {"shape": ["B", *expected.shape[1:]], "dtype": "float32"},
        "classes": list(data.classes),
        "checkpoint": str(session.weights.path) if session.weights else None,
        "differences": differences,
    }
    write_json(folder / "export.json", about)
    files = sorted(path.relative_to(session.folder.path).as_posix() for path in folder.rglob("*") if path.is_file())
    metrics = {f"difference_{name}": value for name, value in differences.items()}
    return make_result(session, metrics, None, files=files, measured_on="export", published=None)


def describe_input(data: Any) -> dict[str, Any]:
    """How to convert the values of files to a model's input, for programs that read the files themselves.

    Args:
        data: an :class:`exp.vision.data.base.ImageData`, set up like the training data.

    Returns:
        ``dtype`` (which every format takes) and ``range`` of the input; ``bands`` of a file, by name or number (null:
        all); ``value_range``: the two values, one pair for all bands or for each band, that values of more than 8 bits
        are clipped to and that become 0 and 255 (null: no scaling); ``no_data``: for each band, the input value where
        a file has no data.
    """
    reader, names = data.read, data.normalization.names
    description: dict[str, Any] = {
        "dtype": "float32",
        "range": [0, 255],
        "bands": None if reader.bands is None else list(names or reader.bands),
        "value_range": reader.value_range,
        "no_data": None if reader.fill is None else reader.fill.tolist(),
    }
    if reader.modalities.statistics:
        description["modality_statistics"] = reader.modalities.statistics
    return description


def relative_difference(output: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest absolute difference, divided by the largest absolute value."""
    if output.shape != expected.shape:
        return float("inf")
    return float((output - expected).abs().max() / expected.abs().max().clamp(min=1e-12))


def _torch_script(_: Session, model: nn.Module, folder: Path, image: torch.Tensor) -> float:
    scores, path = _LogitsModule(model).eval(), str(folder / "model.torchscript.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # sizes become constants, as they are meant to
        traced: Any = torch.jit.trace(scores, image, check_trace=False)
        torch.jit.script(_FixedSize(traced, image)).save(path)
        loaded: Any = torch.jit.load(path)
    return max(_max_difference(loaded, scores, image), _max_difference(loaded, scores, image.to(torch.uint8)))


def _torch_export(_: Session, model: nn.Module, folder: Path, image: torch.Tensor) -> float:
    scores, path = _LogitsModule(model).eval(), str(folder / "model.pt2")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # sizes become constants, as they are meant to
        program = torch.export.export(scores, (image,), dynamic_shapes=({0: torch.export.Dim("batch", min=1)},))
        torch.export.save(program, path)
        loaded: Any = torch.export.load(path).module()
    return _max_difference(loaded, scores, image)


def _hugging_face(session: Session, model: Any, folder: Path, image: torch.Tensor) -> float:
    """Write the backbone for transformers, read it like any other weights, and compare features."""
    folder, backbone = folder / "huggingface", model.backbone
    folder.mkdir(exist_ok=True)
    path, side = folder / "model.safetensors", image.shape[-1]
    mean, std = (values.flatten().tolist() for values in (model.pixel_mean, model.pixel_std))
    write_json(folder / "preprocessor_config.json", processor_config(mean, std, side))
    computed = backbone.write_huggingface(folder, side, model.band_names)
    published = backbone.adapt_state_dict(load_file(str(path)), path)
    loaded, state = copy.deepcopy(backbone), backbone.state_dict()
    loaded.load_state_dict(published.weights)
    mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in published.statistics)
    pixels, expected = (image.float() - mean) / std, _flat_features(backbone, model.normalize(image))
    differing = [name for name in computed if not torch.equal(state[name], published.weights[name])]
    if differing:
        session.print(
            f"export: Hugging Face's form has no {', '.join(differing)}; those of the weights are rounded otherwise "
            "than transformers computes them, which moves features by "
            f"{relative_difference(_flat_features(loaded, pixels), expected):.2g} of the largest"
        )
        # What else differs is an error.
        loaded.load_state_dict({**published.weights, **{name: state[name] for name in differing}})
    return relative_difference(_flat_features(loaded, pixels), expected)


def _flat_features(backbone: Any, pixels: torch.Tensor) -> torch.Tensor:
    features = backbone(pixels)
    return torch.cat([values.flatten(1) for values in (*features.maps, *(features.cls or ()))], dim=1)


def processor_config(mean: Sequence[float], std: Sequence[float], image_size: int) -> dict[str, Any]:
    """Content of ``preprocessor_config.json``.

    Args:
        mean: of each channel, 0..255.
        std: standard deviation of each channel, 0..255.
        image_size: height and width, in pixels, to which images are scaled.
    """
    return {
        "image_processor_type": "DINOv3ViTImageProcessor", "do_resize": True,
        "size": {"height": image_size, "width": image_size}, "do_rescale": True, "rescale_factor": 1 / 255,
        "do_normalize": True, "image_mean": [value / 255 for value in mean],
        "image_std": [value / 255 for value in std],
    }  # fmt: skip


_WRITERS: dict[str, Callable[[Session, Any, Path, torch.Tensor], float]] = {
    "huggingface": _hugging_face, "torchscript": _torch_script, "torch_export": _torch_export,
}  # fmt: skip


def _max_difference(loaded: Callable[[torch.Tensor], torch.Tensor], scores: nn.Module, image: torch.Tensor) -> float:
    """The largest difference over batches of the recorded size, one more image, and a single image."""
    more = torch.cat([image, image[:1].flip(-1)])
    return max(relative_difference(loaded(batch), scores(batch)) for batch in (image, more, more[-1:]))
