"""A calibration as a small file beside the weights that it belongs to.

Only that of a run's own data stays, of the model as it was trained: new rows have no validation part, and take what is
there. The name of the file and its content tell of what it is, so that one calibration never stands for another.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Mapping

import numpy as np
import torch
from omegaconf import OmegaConf

from exp.config.trained import NEUTRAL
from exp.engine import checkpoint
from exp.forecasting.intervals.calibrate import Calibration
from exp.runfolder import to_json, write_atomically

if TYPE_CHECKING:
    from torch import nn

    from exp.config.schema import ExpConfig
    from exp.session import Session

__all__ = ["digest_of", "file_name", "folders", "not_as_trained", "read", "settings_of", "trained_on", "write"]

_COUNTS = ("windows", "of", "fewest")  # of a calibration
_UNSAFE = re.compile(r"[^\w.+-]+")


def digest_of(model: nn.Module) -> str:
    """SHA-256 of the names and values of a model's tensors, 16 hexadecimal digits of it."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().to(torch.float64).numpy().tobytes())  # numpy knows no bfloat16
    return digest.hexdigest()[:16]


def settings_of(config: ExpConfig) -> str:
    """SHA-256 of the keys of ``model``, 16 digits: weights do not tell all of what shapes a forecast."""
    keys: Any = OmegaConf.to_container(config.model, resolve=True)
    told = {key: keys[key] for key in sorted(keys) if not NEUTRAL.match(f"model.{key}")}
    return hashlib.sha256(repr(told).encode()).hexdigest()[:16]


def trained_on(session: Session) -> dict[str, Any] | None:
    """Fingerprint of the files that the weights were trained on (:mod:`exp.data.fingerprint`); None: they do not tell.

    Args:
        session: the session.
    """
    if session.weights is None or session.config.record.trained_in is None:
        return None
    content = checkpoint.read(session.weights.path, mapped=True, whole=False)
    files = content.get("data_files") if isinstance(content, dict) else None
    return files if isinstance(files, dict) and files else None


def not_as_trained(session: Session, data: Any, val: Any, files: Mapping[str, Any] | None) -> str | None:
    """Why a calibration is not that of the run that the weights are from; None: it is.

    Args:
        session: the session.
        data: an :class:`exp.forecasting.data.dataset.ForecastingData`.
        val: the windows that it is made of; None: it is used for new rows.
        files: of :func:`trained_on`.
    """
    if files is None:
        return "the weights do not tell of which run they are, and of which files"
    places = ("data.root", "data.file", "data.archive_folder")  # which file it is, its content tells
    keys = {line: line.partition("=")[0] for line in session.config.record.differs}
    changed = [line for line, key in keys.items() if key.startswith("model.")]
    if val is None:
        return ", ".join(changed) or None
    changed += [line for line, key in keys.items() if key.startswith("data.") and key not in places]
    if list(data.fingerprint().values()) != list(files.values()):
        changed.append(f"{data.path} is not what the weights were trained on ({', '.join(files)})")
    if len(val) < len(data.val):
        changed.append(f"only {len(val)} of {len(data.val)} validation windows are in use")
    return ", ".join(changed) or None


def file_name(about: Mapping[str, Any], kind: str) -> str:
    """Of the file for a calibration.

    Args:
        about: what it holds for.
        kind: what it is made of.
    """
    key = hashlib.sha256(to_json(dict(about)).encode()).hexdigest()[:12]
    return f"{_UNSAFE.sub('-', about['data'])}_{kind}_{key}.npz"


def folders(session: Session) -> list[Path]:
    """Where a calibration is looked for and kept: ``intervals/`` of the run of the weights, else of this one."""
    own, run = session.folder.path / "intervals", session.config.record.trained_in
    return [own] if run is None else [Path(run) / "intervals", own]


def write(session: Session, name: str, about: Mapping[str, Any], found: Calibration) -> Path | None:
    """Keep a calibration in the first folder that can be written.

    Args:
        session: the session; one rank calls.
        name: of the file.
        about: what it holds for.
        found: the calibration.

    Returns:
        The file; None: there is no folder to write to.
    """
    content = io.BytesIO()
    text = to_json({**about, **{key: getattr(found, key) for key in _COUNTS}})
    np.savez_compressed(content, taus=np.asarray(found.taus), offsets=found.offsets, about=np.asarray(text))
    for folder in folders(session):
        try:
            folder.mkdir(mode=0o750, exist_ok=True)
            write_atomically(folder / name, content.getvalue())
        except OSError:  # somebody else's run
            continue
        return folder / name
    return None


def read(path: Path) -> tuple[dict[str, Any], Calibration] | None:
    """What :func:`write` has written; None: there is none, or it is damaged and is made anew."""
    try:
        with np.load(path, allow_pickle=False) as file:
            about = json.loads(str(file["about"]))
            found = Calibration(file["taus"].tolist(), file["offsets"], *map(about.pop, _COUNTS))
    except (OSError, KeyError, ValueError, zipfile.BadZipFile):
        return None
    return about, found
