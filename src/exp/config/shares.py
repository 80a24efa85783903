"""How the ranks of a job divide each batch among them: ``launcher.share`` and ``launcher.shares``. Imports no torch."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Sequence

from exp.errors import ConfigError

if TYPE_CHECKING:
    from exp.config.schema import ExpConfig, LauncherConfig


def rank_share(launcher: LauncherConfig, local_rank: int) -> float | None:
    """The weight of a rank of this node; None: all ranks have equal parts.

    Args:
        launcher: ``config.launcher``, with as many ``shares`` as ranks, if it has any.
        local_rank: of the rank.
    """
    if launcher.shares:
        return launcher.shares[local_rank]
    # In a mixed job every rank has one; where nodes come and go, a batch must divide over any number of ranks.
    has_default = launcher.mixed or launcher.min_nnodes is not None
    return 1.0 if launcher.share is None and has_default else launcher.share


def split_batch(size: int, shares: Sequence[float]) -> list[int]:
    """Divide samples over ranks in the ratio of their shares: whole samples, and at least one for each rank.

    The borders between ranks are rounded, so no part is more than one sample off, unless it would be empty. The result
    depends on the arguments alone.

    Args:
        size: number of samples, at least that of ranks.
        shares: weight of each rank, above 0.

    Returns:
        Samples of each rank.
    """
    total, ranks = sum(shares), len(shares)
    borders = [0]
    for rank, weight in enumerate(itertools.accumulate(shares), 1):
        rounded = math.floor(size * weight / total + 0.5)
        borders.append(min(max(rounded, borders[-1] + 1), size - (ranks - rank)))
    return [end - first for first, end in zip(borders, borders[1:])]


def check_shares(config: ExpConfig) -> list[float]:
    """The weights of all ranks, if the other nodes are like this one; empty: all ranks have equal parts.

    Raises:
        ConfigError: a weight is not positive, their number is not ``nproc``, or both keys are set.
    """
    launcher: LauncherConfig = config.launcher
    shares = list(launcher.shares)
    if shares and launcher.share is not None:
        raise ConfigError("launcher.share and launcher.shares are both set", "leave out one of them")
    if shares and len(shares) != config.nproc:
        raise ConfigError(
            f"launcher.shares={shares} has {len(shares)} weights for nproc={config.nproc}", "give one for each rank"
        )
    weights = [rank_share(launcher, rank) for rank in range(config.nproc)]
    for weight in weights:
        if weight is not None and not 0 < weight < math.inf:
            raise ConfigError(f"launcher.share{'s' * bool(shares)} has {weight}", "each weight must be above 0")
    return [weight for weight in weights if weight is not None] * launcher.nnodes
