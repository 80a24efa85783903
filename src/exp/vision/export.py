"""task=export: a trained model as files that other programs read, each compared with the model before it counts."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Iterator

import torch
from safetensors.torch import load_file, save
from torch import nn

from exp.engine.building import build_data, build_model, make_result, record_environment
from exp.errors import ConfigError, RunError
from exp.hardware.compat import supports_export
from exp.runfolder import write_atomically, write_json
from exp.vision.data.statistics import limits_of
from exp.vision.dinov3.backbone import VisionTransformer
from exp.vision.dinov3.huggingface import beside, model_config, model_tensors, processor_config
from exp.vision.dinov3.weights import adapt_published, with_periods

if TYPE_CHECKING:
    from exp.session import Session

__all__ = ["export", "input_of"]

_BATCH = 2  # that a program is recorded with; compared are others, too
_DTYPES = {"huggingface": "float32", "torchscript": "uint8 or float32", "torch_export": "float32"}
"""What a form takes: files of 8 bits give whole numbers, all others fractions of 0..255."""


class _Scores(nn.Module):
    """What of a model is exported: images in, its ``tensor`` out."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """(B, C, H, W), 0..255 -> what ``model(image=image, mode="tensor")`` gives."""
        return self.model(image=image, mode="tensor")


class _Sized(nn.Module):
    """A recorded program that takes images of the size that it was recorded with alone: others it would get wrong.

    Args:
        program: of ``torch.jit.trace``.
        image: that it was recorded with, (B, C, H, W).
    """

    def __init__(self, program: Any, image: torch.Tensor) -> None:
        super().__init__()
        self.program = program
        self.channels, self.height, self.width = (int(extent) for extent in image.shape[1:])

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """The program's; compiled by ``torch.jit.script``, so in the words that it knows."""
        if image.dim() != 4 or image.size(1) != self.channels:
            raise ValueError("images must be (B, C, H, W) with the channels of export.json")
        if image.size(2) != self.height or image.size(3) != self.width:
            raise ValueError("images must have the size of export.json: resize or cut them, or export with task.size")
        result: torch.Tensor = self.program(image)
        return result


def export(session: Session) -> dict[str, Any]:
    """Write ``export/`` below the run folder, in the forms of ``task.formats``; low-rank updates are merged.

    ``huggingface/`` has the backbone, ``model.torchscript.pt`` and ``model.pt2`` have backbone and head with the
    normalization in them: raw images (B, C, H, W) of ``task.size`` pixels a side, 0..255, go in, and no others.
    ``model.pt2`` takes float32, the other one uint8, too. ``export.json`` says what goes in and comes out.
    Computed on the CPU, in float32, whatever the backend.

    Raises:
        ConfigError: the model has no DINOv3 backbone, or this torch cannot write a form.
        RunError: what was written does not compute what the model does.
    """
    task = session.config.task
    if "torch_export" in task.formats and not supports_export():
        raise ConfigError(
            f"task.formats has torch_export, which takes torch >= 2.5, and this is {torch.__version__}; leave it out"
        )
    record_environment(session)
    data: Any = build_data(session)
    model: Any = build_model(session, data).eval()
    if not isinstance(getattr(model, "backbone", None), VisionTransformer):
        raise ConfigError(f"task=export: model {session.config.model._target_} has no DINOv3 backbone to export")
    side = task.size or int(session.config.data.size)
    # Fractions, as files give them that are not of 8 bits.
    image = torch.rand(_BATCH, data.read.channels, side, side) * 255.0
    with torch.no_grad():
        expected = model(image=image, mode="tensor")
        model.backbone.merge_updates()
        merging = _difference(model(image=image, mode="tensor"), expected)
    session.begin()
    folder = session.folder.path / "export"
    folder.mkdir(exist_ok=True)
    found = {"merging": merging}
    writers: dict[str, Callable[[], float]] = {
        "huggingface": functools.partial(_hugging_face, session, model, folder / "huggingface", image),
        "torchscript": functools.partial(_torch_script, model, folder / "model.torchscript.pt", image),
        "torch_export": functools.partial(_torch_export, model, folder / "model.pt2", image),
    }
    with torch.no_grad():
        for name in task.formats:
            found[name] = writers[name]()
    wrong = {name: value for name, value in found.items() if not value <= task.tolerance}
    if wrong:
        told = ", ".join(f"{name} by {value:.2g}" for name, value in wrong.items())
        raise RunError(
            f"task=export: outputs differ from the model's: {told} of the largest output, more than "
            f"task.tolerance={task.tolerance:g}; do not use {folder}"
        )
    write_json(
        folder / "export.json",
        {
            "input": {
                "shape": ["B", *image.shape[1:]],
                **input_of(data),
                "dtypes": {name: _DTYPES[name] for name in task.formats},
            },
            "output": {"shape": ["B", *expected.shape[1:]], "dtype": "float32"},
            "classes": list(data.classes),
            "checkpoint": str(session.weights.path) if session.weights else None,
            "differences": found,
        },
    )
    files = sorted(path.relative_to(session.folder.path).as_posix() for path in folder.rglob("*") if path.is_file())
    metrics = {f"difference_{name}": value for name, value in found.items()}
    return make_result(session, metrics, None, files=files, measured_on="export", published=None)


def input_of(data: Any) -> dict[str, Any]:
    """How values of files become those that a model takes, for programs that read the files themselves.

    Args:
        data: an :class:`exp.vision.data.base.ImageData`, as the weights were trained on it.

    Returns:
        ``dtype`` (which every form takes) and ``range`` of what goes in; ``bands`` of a file, by name or number (null:
        all); ``value_range``, what becomes 0 and 255, clipped, a number each or one for each band (null: nothing is
        scaled), and whether that goes for ``bytes_too``; the percentiles and the scope of a ``stretch`` (null: there is
        none); what values without data become, by band (``no_data``).
    """
    reader, names = data.read, data.normalization.names
    limits = limits_of(reader.value_range)
    scope = "image" if reader.by_image else "train"
    told: dict[str, Any] = {
        "dtype": "float32",
        "range": [0, 255],
        "bands": None if reader.bands is None else list(names or reader.bands.wanted),
        "value_range": limits,
        "bytes_too": reader.stretch is not None,
        "stretch": None if reader.stretch is None else {"percentiles": list(reader.stretch), "scope": scope},
        "no_data": None if reader.fill is None else reader.fill.tolist(),
    }
    if reader.modalities.state():
        told["modality_statistics"] = reader.modalities.state()
    return told


def _difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, as a share of the largest value."""
    if found.shape != expected.shape:
        return float("inf")
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-12))


def _hugging_face(session: Session, model: Any, folder: Path, image: torch.Tensor) -> float:
    """The backbone alone; read again as any weights are, and compared."""
    backbone, side = model.backbone, image.shape[-1]
    folder.mkdir(exist_ok=True)
    channels = image.shape[1]
    path = folder / "model.safetensors"
    write_atomically(path, save(model_tensors(backbone.state_dict(), backbone.size.gated), {"format": "pt"}))
    layer_scale = float(session.config.model.layer_scale)
    config = model_config(
        backbone.size, backbone.patch_size, model.band_names, channels, side, layer_scale, backbone.rope.periods
    )
    write_json(folder / "config.json", config)
    mean, std = (values.flatten().tolist() for values in (model.pixel_mean, model.pixel_std))
    write_json(folder / "preprocessor_config.json", processor_config(mean, std, side))

    about = beside(path)
    read = VisionTransformer(backbone.size, backbone.patch_size, channels).eval()
    read.load_state_dict(with_periods(adapt_published(load_file(str(path))), about))
    assert about.statistics is not None
    mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in about.statistics)
    pixels = (image.float() - model.pixel_mean) / model.pixel_std
    expected, found = _tokens(backbone, pixels), _tokens(read, (image.float() - mean) / std)
    if not torch.equal(backbone.rope.periods, read.rope.periods):
        by_periods = _difference(found, expected)
        same = copy.deepcopy(backbone)
        same.load_state_dict({**backbone.state_dict(), "rope.periods": read.rope.periods})
        expected = _tokens(same, pixels)
        session.say(
            "export: Hugging Face's form has no periods of the rotary embedding; those of the weights are rounded "
            f"otherwise than transformers computes them, which moves features by {by_periods:.2g} of the largest"
        )
    return _difference(found, expected)


def _tokens(backbone: VisionTransformer, pixels: torch.Tensor) -> torch.Tensor:
    (features,) = backbone(pixels)
    return torch.cat([features.cls.unsqueeze(1), features.patches.flatten(1, 2)], dim=1)


def _torch_script(model: nn.Module, path: Path, image: torch.Tensor) -> float:
    scores = _Scores(model).eval()
    with _quietly():
        traced: Any = torch.jit.trace(scores, image, check_trace=False)
        torch.jit.script(_Sized(traced, image)).save(str(path))
        loaded: Any = torch.jit.load(str(path))
    return max(_compared(loaded, scores, image), _compared(loaded, scores, image.to(torch.uint8)))


def _torch_export(model: nn.Module, path: Path, image: torch.Tensor) -> float:
    scores = _Scores(model).eval()
    with _quietly():
        program = torch.export.export(scores, (image,), dynamic_shapes=({0: torch.export.Dim("batch", min=1)},))
        torch.export.save(program, str(path))
        loaded: Any = torch.export.load(str(path)).module()
    return _compared(loaded, scores, image)


def _compared(loaded: Callable[[torch.Tensor], torch.Tensor], scores: nn.Module, image: torch.Tensor) -> float:
    """The largest difference over batches of one, of that which was recorded, and of one more."""
    more = torch.cat([image, image[:1].flip(-1)])
    return max(_difference(loaded(batch), scores(batch)) for batch in (image, more, more[-1:]))


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """What torch warns of while it records a program: sizes become constants, as they are meant to."""
    log = logging.getLogger("torch.export")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)
