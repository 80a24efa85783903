"""task=features: what a backbone sees in images, as files for further work and as maps to look at."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from exp.engine.building import build_data, build_model, make_result, record_environment
from exp.engine.placement import check_placement
from exp.engine.plots import PictureWriter
from exp.errors import ConfigError
from exp.runfolder import write_atomically
from exp.vision.draw.pictures import beside
from exp.vision.draw.sheet import Tile, sheet, spread
from exp.vision.predict.features import FeatureWriter, feature_picture, index_csv, resized
from exp.vision.predict.images import check, chosen
from exp.vision.predict.inputs import each_of_mine, report_failures, tell_inputs

if TYPE_CHECKING:
    from exp.session import Session
    from exp.vision.predict.features import FeatureFile

__all__ = ["write_features"]


def write_features(session: Session) -> dict[str, Any]:
    """Features of the images of ``task.input`` (null: of the test split), each rank its share of the files.

    Writes ``features/<name>.safetensors`` and ``features.csv``; and for ``task.max_images`` of them, spread over all,
    ``plots/features/<name>.png``: the image beside its three leading principal components in red, green and blue. The
    components are those of all patches of all images, so that a colour means the same everywhere.
    ``plots/features.png`` shows them on one sheet.

    With ``task.store`` the features of the data are kept in a folder instead (:mod:`exp.vision.probe.keep`).

    Raises:
        ConfigError: a key of ``task`` is wrong, there are no images, or the model gives no features.
        RunError: images could not be read; the others are done.
    """
    config, task = session.config, session.config.task
    check(task)
    record_environment(session)
    data: Any = build_data(session)
    model: Any = build_model(session, data).to(session.device)
    if not hasattr(model, "features"):
        raise ConfigError(f"model {config.model._target_} gives no features of images; use model=dinov3_scenes")
    check_placement(model, session.device, session.info.rank)
    model.eval()
    if config.compile:
        model.features = torch.compile(model.features)  # which is called, not the model
    if task.store is not None:
        from exp.vision.probe.keep import keep_features

        return keep_features(session, data, model)
    inputs, _ = chosen(task, data)
    session.begin()

    writer = FeatureWriter(session, model, getattr(data, "read_as_seen", data.read))
    failures = each_of_mine(session, inputs, writer.add)
    gathered = session.distributed.gather((writer.written, failures))
    files = [file for _, file in sorted(pair for part, _ in gathered for pair in part.items())]
    failed = [failure for _, part in gathered for failure in part]
    report = []
    if session.distributed.is_main and files:
        write_atomically(session.folder.path / "features.csv", index_csv(files))
        report = ["features.csv", *(file.features for file in files)]
    if files and task.max_images:
        report += _draw(session, writer, files, data.read)
    report_failures(failed, len(inputs), task.on_error)
    return make_result(
        session,
        {"images": len(files), "failed": len(failed)},
        None,
        files=report,
        data=tell_inputs(session, inputs, failed, data.read),
        measured_on="features",
        published=None,
    )


def _draw(session: Session, writer: FeatureWriter, files: list[FeatureFile], read: Any) -> list[str]:
    """Maps of some images; every rank takes part in the sums, rank 0 draws."""
    components = writer.summed(session.distributed)
    if not session.distributed.is_main:
        return []
    folder, pictures = session.folder, PictureWriter(session)
    tiles, files_drawn = [], []
    for number in spread(len(files), session.config.task.max_images):
        entry = files[number]
        pixels = resized(read(Path(entry.file)), session.config.task.resize)
        pair = feature_picture(folder.path, entry, pixels, components)
        files_drawn += pictures.write(f"plots/features/{Path(entry.features).stem}.png", beside(pair))
        tiles.append(Tile(beside(pair), [Path(entry.features).stem]))
    shares = ", ".join(f"{100 * share:.0f} %" for share in components.explained)
    title = f"Principal components of the patch features in red, green, blue: {shares} of the variance"
    return files_drawn + pictures.write("plots/features.png", sheet(tiles, side=440, title=title))
