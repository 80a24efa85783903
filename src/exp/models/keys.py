"""The typed keys of exp's own model, ``model=plain``. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional, Union

from omegaconf import MISSING

PREDICTIONS = ("identity", "argmax", "softmax", "sigmoid")


@dataclass
class PlainConfig:
    """Keys of :class:`exp.models.plain.PlainModel`: a torch module, its loss, and what they take of a batch."""

    _target_: str = "exp.models.plain.PlainModel"
    module: Dict[str, Any] = field(default_factory=lambda: {"_target_": MISSING})
    """The network: ``_target_``, a class of ``torch.nn`` or of a package in ``plugins``, and its arguments. Arguments
    that the data know (``num_classes``, ``in_channels``) need not be given."""
    loss: Dict[str, Any] = field(default_factory=dict)
    """The loss: ``_target_``, a class of ``torch.nn`` or a function of ``torch.nn.functional``, or one of a package in
    ``plugins``, and its arguments. It is called with the output and the target, and gives a number."""
    losses: List[Any] = field(default_factory=list)
    """Several losses instead of ``loss``: the sum of all, each times its ``weight`` (1 if left out)."""
    inputs: Any = None
    """Keys of a batch that go in: a list, by position, or a dictionary, by the name of the argument of ``forward``;
    null: each argument of ``forward`` that is also a key of the batch."""
    output: Optional[Union[str, int]] = None
    """What counts of an output that is no tensor: a key or an attribute, such as ``logits``, or an index."""
    target: Optional[str] = None
    """Key of a batch with the target; null: ``y``, ``target``, ``targets``, ``label`` or ``labels``."""
    predict: str = "identity"
    """What metrics and predictions get: the output itself (``identity``), or ``argmax``, ``softmax`` (both over
    dimension 1) or ``sigmoid`` of it."""
