"""What heads share: layers, and checks of their settings."""

from __future__ import annotations

from torch import nn

from exp.errors import ConfigError

__all__ = ["check_dropout", "norm_layer"]


def norm_layer(kind: str, channels: int) -> nn.Module:
    """The norm that ``model.head_norm`` names.

    Args:
        kind: ``batch`` (statistics over the batch: synchronise them over devices with ``wrapper.sync_batchnorm``) or
            ``group`` (does not look at the batch, so results do not depend on how it is spread over devices).
        channels: of the map.

    Raises:
        ConfigError: there is no such norm.
    """
    if kind == "batch":
        return nn.BatchNorm2d(channels)
    if kind == "group":
        # At most 32 groups (Wu and He, arXiv 1803.08494), and no fewer than 8 channels in each.
        groups = next(count for count in (32, 16, 8, 4, 2, 1) if count == 1 or channels % (8 * count) == 0)
        return nn.GroupNorm(groups, channels)
    raise ConfigError(f"model.head_norm={kind} is not one of batch, group")


def check_dropout(dropout: float) -> None:
    """Refuse a probability that is none.

    Raises:
        ConfigError: names the key.
    """
    if not 0.0 <= dropout < 1.0:
        raise ConfigError(f"model.dropout={dropout} is not a probability below 1")
