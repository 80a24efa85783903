"""Reads weights of exp and of other projects, and loads them into a model (``init_from``).

A task that uses a trained model as it is (eval, predict, features) needs an exact match: every tensor of the model must
be in the file, and every tensor of the file in the model. Otherwise part of the model would be random, or the model
would differ from the trained one. A training may start with a new head, for example for other classes; ``init_partial``
allows more.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Container, Mapping, NamedTuple, Sequence

import torch
from mmengine.model import BaseModel
from omegaconf import OmegaConf

from exp import hub
from exp.config.compose import is_hub_source
from exp.config.diff import format_value
from exp.config.resolve import create
from exp.data.base import Data
from exp.data.fingerprint import folder_listing, shortened
from exp.data.loader import preserved_generators
from exp.engine.checkpoint.reader import BEST_NAME, NO_DIGEST, list_checkpoints, nonfinite_tensors, read_checkpoint
from exp.errors import CheckpointError, ConfigError, qualified_name
from exp.hub.files import INDEX, snapshot_in
from exp.models.base import Model
from exp.runs.files import read_seal
from exp.session import Weights

if TYPE_CHECKING:
    from torch import nn

    from exp.config.schema import ExpConfig
    from exp.session import Session


def read_weights(path: Path, trusted: bool = False) -> Weights:
    """Read the weights of exp's checkpoints, or of other projects.

    Args:
        path: a ``.pth``, ``.bin`` or ``.safetensors`` file, the index of several ``.safetensors`` files, a run folder
            (its best checkpoint, or else the newest), a folder of weights, a repository's folder in the cache of a hub
            (``models--<owner>--<name>``), or a name in a hub (:mod:`exp.hub`).
        trusted: see :func:`exp.engine.checkpoint.reader.read_checkpoint`.

    Raises:
        CheckpointError: the file cannot be read, holds no state dict, or is not the one that its run wrote.
        ConfigError: the folder contains no weights.
        UnavailableError: the weights cannot be fetched from the hub.
    """
    if is_hub_source(str(path)):
        path = hub.local_file(str(path))
    elif path.is_dir():
        path = _file_in(path)
    content = read_checkpoint(path, mapped=True, trusted=trusted)
    state = find_state_dict(content, path)
    is_of_exp = isinstance(content, Mapping) and "state_dict" in content and isinstance(content.get("data"), dict)
    return Weights(path, state, content["data"] if is_of_exp else None)


def _file_in(folder: Path) -> Path:
    """The file of weights in a folder (:func:`read_weights`).

    Raises:
        ConfigError: there is none, or there are several.
    """
    root = snapshot_in(folder)
    root = root / "checkpoints" if (root / "checkpoints").is_dir() else root
    candidates = [root / BEST_NAME, *list_checkpoints(root), root / "model.safetensors"]
    files = [path for path in [*candidates, root / INDEX] if path.is_file()][:1]
    files = files or [path for path in root.iterdir() if path.suffix in (".safetensors", ".pth", ".pt", ".bin")]
    if len(files) != 1:
        raise ConfigError(
            f"init_from={folder} holds {'several weights, give one' if files else 'no checkpoint'}",
            "looked for best.pth, step_*.pth, model.safetensors and its index, and a single .safetensors, .pth, .pt or "
            ".bin",
            [folder_listing(root)],
            key="init_from",
            file=folder,
        )
    return files[0]


class OtherClasses(NamedTuple):
    """How the classes of weights differ from those of the data.

    Attributes:
        old: names of the classes of the weights, in the order of their labels.
        new: those of the data.
        axes: for each tensor of the model whose shape depends on the number of classes, the axis of the classes; None:
            it is not clear which.
    """

    old: Sequence[str]
    new: Sequence[str]
    axes: Mapping[str, int | None]

    def fit(self, state: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], str]:
        """Sort the rows by class; if the classes are others, leave out the tensors, so that they start anew.

        Returns:
            The tensors, and a line for the user; empty if there is no such tensor.
        """
        rows = {name: axis for name, axis in self.axes.items() if name in state}
        names = shortened(list(rows), 4)
        if not rows:
            return dict(state), ""
        if sorted(self.old) == sorted(self.new) and None not in rows.values():
            order = torch.tensor([self.old.index(name) for name in self.new])
            sorted_rows = {
                name: state[name].index_select(axis, order) for name, axis in rows.items() if axis is not None
            }
            line = f"the weights know the same {len(self.old)} classes in another order; {names} go by name"
            return {**state, **sorted_rows}, line
        both = f"{shortened(self.old)}) than the data have ({shortened(self.new)}"
        remaining = {name: value for name, value in state.items() if name not in rows}
        return remaining, f"the weights know other classes ({both}); {names} are initialized anew"


def other_classes(session: Session, data: Data, model: nn.Module) -> OtherClasses | None:
    """How the classes of the weights differ from those of the data; None: they are the same, or not known.

    Raises:
        ConfigError: ``class_rows`` of the model names a tensor that it does not have.
    """
    assert session.weights is not None
    old, new = (list((state or {}).get("classes") or ()) for state in (session.weights.data, session.data_state))
    if old == new or not old or not new or not all(isinstance(name, str) for name in (*old, *new)):
        return None
    tensors, arguments = model.state_dict(), data.model_arguments()
    axes: dict[str, int | None] = {}
    declared = getattr(model, "class_rows", None)
    if declared is not None:
        axes = dict.fromkeys(declared, 0)
        if not tensors.keys() >= axes.keys():
            raise ConfigError(
                f"model: {qualified_name(model)}.class_rows names {', '.join(axes.keys() - tensors.keys())}, "
                "which it lacks"
            )
    elif "num_classes" in arguments:
        count = arguments["num_classes"]
        with preserved_generators():
            larger: Any = create(
                session.config.model, (Model, BaseModel), "model", **{**arguments, "num_classes": count + 1}
            )
        for name, value in larger.state_dict().items():
            if name in tensors and value.shape != tensors[name].shape:
                pairs = enumerate(zip(tensors[name].shape, value.shape))
                changed = [axis for axis, (size, more) in pairs if size != more]
                fits = len(changed) == 1 and tensors[name].shape[changed[0]] == count
                axes[name] = changed[0] if fits and value.dim() == tensors[name].dim() else None
    return OtherClasses(old, new, axes)


def load_weights(
    model: nn.Module,
    weights: Weights,
    config: ExpConfig,
    exact: bool,
    classes: OtherClasses | None = None,
) -> str:
    """Load weights into a model, in place.

    Args:
        model: the model. If it has them, these methods of :class:`exp.models.base.Model` are used:
            ``adapt_state_dict(state, path)``, which renames tensors of other projects; for training
            ``fit_state_dict(state, path)``, which changes shapes; and ``is_new_head(name)``, which tells the
            parameters that may be missing when a training starts.
        weights: of :func:`read_weights`.
        config: the frozen configuration.
        exact: whether the model is used without training, which needs an exact match.
        classes: how the classes of the weights differ from those of the data, for a training; None: they do not.

    Returns:
        A report for the user: how many tensors match, and which do not.

    Raises:
        ConfigError: the weights do not match the model, or are not finite.
    """
    path, tensors, task = weights.path, model.state_dict(), str(config.task.name)
    any_model: Any = model
    state: Any = weights.state
    if hasattr(model, "adapt_state_dict"):
        state = any_model.adapt_state_dict(state, path)
    if not exact and hasattr(model, "fit_state_dict"):
        state = any_model.fit_state_dict(state, path)
    line = ""
    if classes is not None:
        state, line = classes.fit(state)
    fitting = {key: value for key, value in state.items() if key in tensors and value.shape == tensors[key].shape}
    missing = [key for key in tensors if key not in state]
    others = [key for key in state if key in tensors and key not in fitting]
    unknown = [key for key in state if key not in tensors]
    shapes = [
        f"{key} {tuple(state[key].shape)} in the file, {tuple(tensors[key].shape)} in the model" for key in others
    ]
    listed = {"missing in the file": missing, "other shape": shapes, "unknown to the model": unknown}
    count = f"{len(fitting)} of {len(tensors)} tensors"
    mismatches = [f"{title}: {shortened(names)}" for title, names in listed.items() if names]
    is_new_head: Any = getattr(model, "is_new_head", lambda _: False)
    rows: Container[str] = classes.axes if classes is not None else ()
    head_alone = all(name in rows or is_new_head(name) for name in [*missing, *others])
    reason = ""
    if exact and not (head_alone and all(map(is_new_head, unknown)) if task == "features" else not mismatches):
        # Features are the output of the backbone, so the head may differ.
        reason = f"task={task} needs all weights of the model, and {path} does not fit it"
        differs = ", ".join(config.record.differs)
        cure = f"not as in the run: {differs}" if differs else "use the settings with which the weights were trained"
    elif not exact and not (fitting and (head_alone or config.init_partial)):
        reason = f"init_from: {path} fits the model only in part: more than a new head is missing or differs"
        cure = "init_partial=true starts the rest from random weights" if fitting else "it holds another model"
    if reason:
        raise ConfigError("; ".join([f"{reason}: {count}", cure, *mismatches]))
    nonfinite = nonfinite_tensors(fitting, {name for name, _ in model.named_parameters()})
    if nonfinite:
        raise ConfigError(
            f"init_from: {path} has weights that are not finite: {shortened(nonfinite, 1)}; their training has "
            "diverged, use other weights"
        )
    model.load_state_dict(fitting, strict=False)
    report = f"init_from: {count} from {path}"
    if path.is_file() and read_seal(path) is None:
        report += f" ({NO_DIGEST})"
    unverifiable = {key: OmegaConf.select(config.model, key) for key in getattr(model, "unverifiable_keys", ())}
    trusted = [f"model.{key}={format_value(value)}" for key, value in unverifiable.items()]
    if trusted and config.record.trained_in is None:
        report += f"\n  taken on trust, since the weights cannot confirm them: {', '.join(trusted)}"
    return report if exact else "\n  ".join([report, *mismatches, *[line] * bool(line)])


_STATE_DICT_KEYS = ("state_dict", "model", "teacher", "student")
# torch.compile, FSDP and activation checkpointing may wrap any module inside a model.
_WRAPPER_PREFIX = re.compile(r"(?:(?<=\.)|^)(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")


def find_state_dict(content: Any, source: Path | None = None) -> OrderedDict[str, torch.Tensor]:
    """Find the model's state dict in ``content``, and remove the prefixes that wrappers add to its names.

    Args:
        content: a state dict, or a dict that has one under ``state_dict`` (exp, MMEngine, Lightning), ``model``,
            ``teacher`` (self-distillation, such as DINO; preferred to the student) or ``student``.
        source: the file, for messages.

    Raises:
        CheckpointError: there is no state dict.
    """
    state = content
    for _ in range(4):  # such as {"model": {"teacher": {...}}}
        if not isinstance(state, Mapping):
            break
        if state and all(isinstance(value, torch.Tensor) for value in state.values()):
            names = OrderedDict((_WRAPPER_PREFIX.sub("", key), value) for key, value in state.items())
            while all(key.startswith("module.") for key in names):  # from DDP and DataParallel, which wrap the model
                names = OrderedDict((key[len("module.") :], value) for key, value in names.items())
            return names
        inner = next((state[key] for key in _STATE_DICT_KEYS if isinstance(state.get(key), Mapping)), None)
        if inner is None:
            break
        state = inner
    raise CheckpointError(f"{source or 'the file'} has no tensors by name, nor any under {', '.join(_STATE_DICT_KEYS)}")
