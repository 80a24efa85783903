from __future__ import annotations

import json

import numpy as np
import pytest
from omegaconf import OmegaConf
from PIL import Image

CONFIG = {
    "backend": {"_target_": "somewhere.CpuBackend", "name": "cpu", "options": {}},
    "launcher": {"_target_": "auto", "nnodes": 1},
    "task": {"name": "train"},
    "model": {"_target_": "exp.forecasting.timebridge.model.TimeBridge", "d_model": 64, "lookback": 96},
    "data": {"_target_": "exp.forecasting.data.dataset.ForecastingData", "name": "ETTh1", "lookback": 96},
    "optim": {"type": "Adam", "lr": 0.001},
    "schedule": {"param_scheduler": [{"type": "OneCycleLR", "eta_max": 0.001, "total_steps": 4}]},
    "name": "timebridge_small", "seed": 1, "nproc": 1, "batch_size": 32, "global_batch_size": 32, "max_epochs": 4,
    "resume": None,
}  # fmt: skip
RESULT = {
    "task": "train", "backend": "cpu", "world_size": 1, "steps": 40, "wall_s": 12.3456, "samples_per_second": 1234.5678,
    "measured_on": "test", "error": None, "devices": [{"name": "Some Processor", "index": None, "host": "here"}],
}  # fmt: skip


@pytest.fixture
def make_run(tmp_path):
    """Writes a run folder as the framework does; ``config`` has dotted keys that differ from the usual ones."""

    def make(place, metric=None, overrides=(), config=None, error=None, records=(), pictures=(), **result):
        folder = tmp_path / place
        (folder / "logs").mkdir(parents=True)
        (folder / "logs" / "rank0.log").write_text("begun\n")
        settings = OmegaConf.create({**CONFIG, "output_dir": str(folder)})
        for key, value in (config or {}).items():
            OmegaConf.update(settings, key, value, merge=False)
        given = dict(override.split("=", 1) for override in overrides)
        chosen = {"experiment": settings.name, "task": settings.task.name, "backend": settings.backend.name,
                  "data": "etth1", "model": "timebridge_small", "optim": "adam", "schedule": "onecycle"}  # fmt: skip
        recorded = {key: given.get(key, choice) for key, choice in chosen.items()}
        record = OmegaConf.merge({"chosen": recorded, "follows": {"data.seed": "seed"}}, settings.pop("record", {}))
        (folder / "env.json").write_text(json.dumps({"record": OmegaConf.to_container(record)}))
        OmegaConf.save(settings, folder / "config.yaml")
        OmegaConf.save(OmegaConf.create(list(overrides)), folder / "overrides.yaml")
        if metric is not None:
            name = result.setdefault("metric_name", "mse")
            # As many digits as training leaves: reports have to round them themselves.
            result = {"status": "completed", "metric": metric, "metrics": {name: metric, "mae": metric / 2},
                      "selected_by": {"metric": name, "value": metric}, **result}  # fmt: skip
        if error is not None:
            failed = {"rank": 0, "type": "RunError", "message": error}
            result = {"status": "failed", "metric": None, "metric_name": None, "metrics": {}, "error": failed, **result}
        if result:
            (folder / "result.json").write_text(json.dumps({**RESULT, "experiment": settings.name, **result}))
        if records:
            (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        for name in pictures:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.zeros((600, 900, 3), np.uint8)).save(folder / name)
        return folder

    return make


@pytest.fixture
def make_sweep(make_run):
    """A sweep over the learning rate and the seed, as Hydra's multirun leaves it: metrics, curves, one failed job."""

    def make():
        for number, (rate, seed) in enumerate((rate, seed) for rate in (1e-4, 1e-3, 1e-2) for seed in (1, 2)):
            score = 0.4 + abs(np.log10(rate) + 3) / 10 + seed / 100
            records = [{"split": "train", "step": step, "epoch": 0, "loss": 1 / step + score, "lr": rate,
                        "samples_per_second": 100.0} for step in range(2, 42, 2)]  # fmt: skip
            records += [{"split": "val", "step": step, "epoch": 0, "mse": 1 / step + score} for step in (10, 20, 40)]
            outcome = {"error": "loss is nan\nat step 7"} if number == 5 else {"metric": score}
            folder = make_run(
                f"sweep/{number}", overrides=[f"optim.lr={rate}", f"seed={seed}", "output_dir=sweep"],
                config={"optim.lr": rate, "seed": seed, "data.seed": seed}, records=records, **outcome,
            )  # fmt: skip
        (folder.parent / "multirun.yaml").write_text("hydra: {}\n")
        return folder.parent

    return make
