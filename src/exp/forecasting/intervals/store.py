"""A calibration as a small file beside the weights that it belongs to."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Mapping

import numpy as np
import torch

from exp.forecasting.intervals.calibrate import Calibration
from exp.runfolder import to_json, write_atomically

if TYPE_CHECKING:
    from torch import nn

    from exp.session import Session

__all__ = ["digest_of", "folders", "read", "write"]


def digest_of(model: nn.Module) -> str:
    """SHA-256 of the names and values of a model's tensors, 16 hexadecimal digits of it."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().to(torch.float64).numpy().tobytes())  # numpy knows no bfloat16
    return digest.hexdigest()[:16]


def folders(session: Session) -> list[Path]:
    """Where a calibration is looked for and kept: ``intervals/`` of the run of the weights, and of this one."""
    own = session.folder.path / "intervals"
    if session.weights is None:
        return [own]
    run = session.weights.path.absolute().parent.parent
    return [run / "intervals", own] if (run / "config.yaml").is_file() else [own]


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
    text = to_json({**about, "windows": found.windows, "of": found.of})
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
            found = Calibration(file["taus"].tolist(), file["offsets"], about.pop("windows"), about.pop("of"))
    except (OSError, KeyError, ValueError, zipfile.BadZipFile):
        return None
    return about, found
