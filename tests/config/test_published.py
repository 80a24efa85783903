"""Every row of the published TimeBridge tables is one command: it composes, and has the values of the authors' logs.

The values are those that github Hank0626/TimeBridge, commit 0f9a83f, prints at the head of ``_logs/*_<horizon>.logs``:
its ``Namespace(...)`` is the same for the four horizons of a data set, but for ``pred_len``.
"""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from tests.config.conftest import composed

KEYS = ("period", "num_p", "n_heads", "stable_len", "d_model", "d_ff", "layers", "attn_dropout", "alpha", "batch_size",
        "epochs", "patience", "lr", "lradj")  # fmt: skip
LOGS = {
    "etth1": (24, None, 8, 6, 128, 128, (3, 1, 0), 0.15, 0.35, 64, 100, 10, 2e-4, "type1"),
    "etth2": (48, None, 4, 6, 128, 128, (3, 1, 0), 0.15, 0.35, 16, 100, 15, 1e-4, "type1"),
    "ettm1": (48, 6, 4, 6, 64, 128, (3, 1, 0), 0.15, 0.35, 64, 100, 15, 2e-4, "TST"),
    "ettm2": (48, None, 4, 6, 64, 128, (3, 1, 0), 0.15, 0.35, 64, 100, 10, 2e-4, "TST"),
    "weather": (48, 12, 8, 6, 128, 128, (1, 1, 1), 0.15, 0.1, 32, 10, 3, 1e-4, "type1"),
    "solar": (48, 12, 8, 6, 128, 128, (1, 1, 1), 0.15, 0.05, 32, 100, 15, 5e-4, "type1"),
    "electricity": (24, 4, 32, 4, 512, 512, (1, 1, 2), 0.1, 0.2, 16, 10, 3, 5e-4, "type1"),
    "traffic": (24, 8, 64, 2, 512, 512, (1, 1, 3), 0.15, 0.35, 4, 100, 5, 5e-4, "type1"),
}
HORIZONS = (96, 192, 336, 720)
SCHEDULES = {"type1": "ExponentialLR", "TST": "TorchOneCycle"}


def values_of(config):
    model = config.model
    layers = (model.integrated_layers, model.downsampling_layers, model.cointegrated_layers)
    (scheduler,) = config.schedule.param_scheduler
    (name,) = (name for name, kind in SCHEDULES.items() if kind == scheduler.type)
    return (model.period, model.num_patches_out, model.num_heads, model.stable_len, model.d_model, model.d_ff, layers,
            model.attention_dropout, model.alpha, config.global_batch_size, config.max_epochs, config.patience,
            config.optim.lr, name)  # fmt: skip


@pytest.mark.parametrize("name", LOGS)
def test_every_row_is_one_command(name):
    for horizon in HORIZONS:
        config = composed(f"experiment=timebridge_{name}", f"data.horizon={horizon}")
        assert dict(zip(KEYS, values_of(config))) == dict(zip(KEYS, LOGS[name])), horizon
        assert (config.data.lookback, config.model.lookback, config.model.horizon) == (720, 720, horizon)
        assert (config.model.dropout, config.optim.type) == (0.0, "Adam")
        assert config.model.channels == config.data.channels
        assert config.reference.data == config.data.name
        assert set(config.reference.metrics[horizon]) == {"mse", "mae"}
    if config.schedule.param_scheduler[0].type == "TorchOneCycle":
        assert config.schedule.param_scheduler[0].pct_start == 0.2


@pytest.mark.parametrize(
    ("choices", "kind", "by_epoch"),
    [
        ([], "ExponentialLR", True),
        (["data=weather"], "ExponentialLR", True),
        (["data=csv", "data.name=shop", "data.file=shop.csv", "data.channels=1"], "CosineAnnealingLR", False),
        (["data=csv", "data.name=shop", "data.file=shop.csv", "data.channels=1", "schedule=halving"],
         "ExponentialLR", True),
        (["data=csv", "data.name=shop", "data.file=shop.csv", "data.channels=1", "experiment=timebridge_etth1"],
         "ExponentialLR", True),
    ],
)  # fmt: skip
def test_the_default_experiment_has_a_schedule_over_steps_for_a_series_of_ones_own(choices, kind, by_epoch):
    (scheduler,) = OmegaConf.to_container(composed(*choices).schedule, resolve=True)["param_scheduler"]
    assert (scheduler["type"], scheduler["by_epoch"]) == (kind, by_epoch)
    assert scheduler["begin"] == (1 if by_epoch else 0.7)
    assert scheduler.get("gamma") == (0.5 if by_epoch else None)
