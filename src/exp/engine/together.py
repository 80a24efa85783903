"""Evaluation of a sharded model, whose forward passes are collectives, by ranks that have different numbers of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable

import torch

from exp.engine.fsdp import units_of
from exp.errors import RunError

if TYPE_CHECKING:
    from torch import nn

    from exp.engine.distributed import Distributed

__all__ = ["Together"]

_PAGE = "docs/estimate.md"


class Together:
    """Evaluates a sharded model on ranks that have different numbers of forward passes to make.

    Weights come together in each of them, so all ranks make as many. Before each, the ranks say whether they have one
    of their own; one that is through with its samples makes passes beside the others, until none has.

    Args:
        model: bare, sharded.
        group: :class:`exp.engine.distributed.Distributed`.
        one_pass: takes a sample through the model, the same one on every rank.
    """

    def __init__(self, model: nn.Module, group: Distributed, one_pass: Callable[[], object]) -> None:
        self._group, self._one_pass = group, one_pass
        self._idle = False
        self._votes = 0
        first = next(iter(units_of(model)), model)
        # Before torch's own hook, which gathers.
        self._handle = first.register_forward_pre_hook(self._vote, prepend=True)

    def _vote(self, *_: Any) -> None:
        self._votes += 1
        working = int(self._group.sum(torch.tensor([0 if self._idle else 1])))
        if self._idle and not working:
            raise _AllThrough

    def finish(self) -> None:
        """This rank is through; make passes until every other is. A collective.

        Raises:
            RunError: a prediction does not come through the units that are sharded.
        """
        self._idle = True
        try:
            while True:
                votes = self._votes
                self._one_pass()
                if self._votes == votes:
                    raise RunError(
                        f"wrapper=fsdp: a prediction does not call the model's first sharded unit; see {_PAGE}"
                    )
        except _AllThrough:
            pass
        self._handle.remove()
        self._one_pass()  # to its end: what torch keeps of a pass that was left in its middle is not for the next step


class _AllThrough(BaseException):
    """No rank has a sample left."""
