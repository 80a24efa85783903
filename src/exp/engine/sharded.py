"""Checkpoints of a model that no rank has whole: every rank reads its own part (:mod:`exp.engine.sharded_save` writes).

``step_<n>.pth`` is the plain checkpoint that it always is, but what is sharded lies beside it, in a folder of torch's
distributed checkpoint (``step_<n>.shards0``); it names the folder and the sizes of its files, and is written after
them: without it they count for nothing. Best weights are one plain ``best_<step>.safetensors`` beside ``best.pth``.
Whoever reads such a file gets tensors as wanted: parts of them for a sharded model, on any number of ranks, or whole
ones.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Iterator, Mapping, Sequence

import torch

from exp.engine import sharded_files as files
from exp.engine.fsdp import is_sharded, sharded_parameters
from exp.errors import CheckpointError

if TYPE_CHECKING:
    from torch import nn

__all__ = ["adopt_best", "complete", "key_of", "sharded_tensors", "tidy", "without_sharded"]

BESIDE = "beside"
"""Key of a checkpoint that tells what lies beside it: ``{"name", "digests", "folder"}``, the last where it was read.

Older versions kept ``sizes`` in the place of ``digests``."""


def adopt_best(content: Mapping[str, Any], folder: Path) -> None:
    """Copy the weights beside a checkpoint into another folder, where the checkpoint is about to be written."""
    if BESIDE in content:
        source = Path(content[BESIDE]["folder"], content[BESIDE]["name"])
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f".{source.name}.tmp"
        shutil.copyfile(str(source), str(temporary))
        temporary.replace(folder / source.name)


def tidy(path: Path, content: Mapping[str, Any]) -> None:
    """Once ``path`` is there: remove what lay beside the file that it took the place of.

    Args:
        path: of the checkpoint.
        content: what has been written there.
    """
    kept = content.get(BESIDE, {}).get("name")
    for each in companions(path):
        if each.name != kept:
            _remove(each)


def companions(path: Path) -> list[Path]:
    """What lies beside a checkpoint and belongs to it, or to one that was there before it."""
    own = re.compile(rf"{re.escape(path.stem)}(\.shards\d+|_\d{{8}}\.safetensors)")
    return [each for each in path.parent.glob(f"{path.stem}*") if own.fullmatch(each.name)]


def remove(path: Path) -> None:
    """Remove a checkpoint, and then what lies beside it."""
    path.unlink()
    for each in companions(path):
        _remove(each)


def remove_orphans(folder: Path) -> None:
    """Remove shards without their checkpoint: of a writer that was killed."""
    for each in folder.glob("step_*.shards*"):
        if not (folder / f"{each.name.partition('.')[0]}.pth").is_file():
            _remove(each)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def opened(path: Path, content: Any, check: bool = True) -> Any:
    """What has been read from ``path``, after a look at what lies beside it.

    Args:
        path: of the checkpoint.
        content: of it.
        check: whether to compare digests; else it is enough that the files are there.

    Raises:
        CheckpointError: it is not there, or not as it was written.
    """
    if isinstance(content, Mapping) and isinstance(content.get(BESIDE), Mapping):
        beside = {**content[BESIDE], "folder": str(path.parent)}
        place = path.parent / str(beside["name"])
        kind = "sizes" if "sizes" in beside else "digests"
        known = dict(beside[kind])
        found = files.sizes(place) if kind == "sizes" else files.digests(place) if check else known
        if place.name != beside["name"] or not place.exists() or found != known:
            raise CheckpointError(f"{path}: {beside['name']} beside it is missing or not as it was written")
        return {**content, BESIDE: beside}
    return content


def complete(
    content: Mapping[str, Any],
    model: nn.Module | None = None,
    trained: Sequence[nn.Parameter] = (),
    state: bool = True,
) -> dict[str, Any]:
    """A checkpoint with all its tensors: for a sharded model this rank's part of each, else whole ones on the CPU.

    Args:
        content: as :func:`exp.engine.checkpoint.read` gives it, from whatever number of ranks, sharded or not.
        model: without a wrapper, to be given the weights; None: not sharded.
        trained: parameters in the order in which the optimizer's state counts them; empty: a model wants none of it.
        state: whether the optimizer's state, two thirds of the bytes, is wanted where there is no model.

    Raises:
        CheckpointError: what lies beside the file does not open, or does not fit the model.
    """
    sharded = dict(_of_parameters(model, trained)) if model is not None and is_sharded(model) else {}
    beside = content.get(BESIDE)
    if beside is None and not sharded:
        return dict(content)
    done = {key: value for key, value in content.items() if key != BESIDE}
    done["state_dict"] = dict(content["state_dict"])
    if "optimizer" in content:
        done["optimizer"] = _copied(content["optimizer"])
    whole = {key_of(place): value for place, value in _tensors(done)}
    found: Mapping[str, Any] = {}
    path = None
    if beside is not None:
        path = Path(beside["folder"], beside["name"])
    try:
        if path is not None and path.suffix == ".safetensors":
            found = files.read_weights(
                path, {key[1]: value for key, value in sharded.items() if key[0] == "state_dict"}
            )
            found = {key_of(("state_dict", name)): value for name, value in found.items()}
        elif path is not None:
            prefix = "" if trained or (model is None and state) else "state_dict/"
            found = files.load_shards(path, lambda key: _like(key, sharded), prefix)
        for key, value in found.items():
            _put(done, _place(key), value)
        for key, value in whole.items():
            like = _like(key, sharded)
            if like is not None and value.dim():
                _put(done, _place(key), files.part_of(value, like))
    except CheckpointError:
        raise
    except Exception as error:
        said = str(error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError(f"cannot read {path}: {said[0][:200]}") from error
    return done


# -- where tensors stand in a checkpoint: ("state_dict", name) or ("optimizer", index, key) ----------------------------


def key_of(place: tuple[Any, ...]) -> str:
    """Its name in a distributed checkpoint."""
    return "/".join(map(str, place))


def _place(key: str) -> tuple[Any, ...]:
    part, _, rest = key.partition("/")
    if part == "state_dict":
        return part, rest
    index, _, name = rest.partition("/")
    return part, int(index), name


def _tensors(content: Mapping[str, Any]) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
    for name, value in content["state_dict"].items():
        if isinstance(value, torch.Tensor):
            yield ("state_dict", name), value
    for index, state in content.get("optimizer", {}).get("state", {}).items():
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                yield ("optimizer", index, name), value


def sharded_tensors(content: Mapping[str, Any]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Those of a checkpoint that are sharded, with their places."""
    return ((place, value) for place, value in _tensors(content) if hasattr(value, "full_tensor"))


def without_sharded(content: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint but for its sharded tensors."""
    left = {**content, "state_dict": dict(content["state_dict"]), "optimizer": _copied(content["optimizer"])}
    for (part, *rest), _ in list(sharded_tensors(left)):
        holder = left[part] if part == "state_dict" else left[part]["state"][rest[0]]
        del holder[rest[-1]]
    return left


def _copied(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    return {**optimizer, "state": {index: dict(state) for index, state in optimizer["state"].items()}}


def _put(content: dict[str, Any], place: tuple[Any, ...], value: Any) -> None:
    part, *rest = place
    holder = content[part] if part == "state_dict" else content[part]["state"].setdefault(rest[0], {})
    holder[rest[-1]] = value


def _of_parameters(model: nn.Module, trained: Sequence[nn.Parameter]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Sharded parameters by their place in ``state_dict``, and by their number in the optimizer."""
    for name, parameter in sharded_parameters(model).items():
        yield ("state_dict", name), parameter
    for index, parameter in enumerate(trained):
        yield ("optimizer", index), parameter


def _like(key: str, sharded: Mapping[tuple[Any, ...], Any]) -> Any:
    """The sharded parameter that a tensor goes with; None: there is none."""
    return sharded.get(_place(key)[:2])
