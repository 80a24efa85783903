"""Distillation: a student learns from a teacher, by the terms of ``model.distillation``.

The student is any model of images; :mod:`exp.vision.teachers` has the teachers.

Shapes below: B images of H x W pixels, K classes, C_i channels and h_i x w_i cells of level i.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Callable, ClassVar, Iterator, Mapping, NamedTuple, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from exp.config.resolve import create
from exp.data.fingerprint import shortened
from exp.errors import ConfigError
from exp.hardware.compat import autocast_disabled
from exp.models.dropout import Dropout
from exp.vision.backbones.base import Backbone
from exp.vision.metrics import CosineSimilarity

_EPS = 1e-6


@dataclass
class Outputs:
    """What one of the two networks computes for a batch.

    Attributes:
        logits: (B, K), or (B, K, H, W); None: no term needs them.
        maps: level -> (B, C_i, h_i, w_i).
        tokens: level -> the CLS token (B, C_i); without such a token the mean of the map.
        attention: level -> the weights between cells, the mean over heads: (B, h_i, w_i, h', w'). For each cell the sum
            over the h' x w' cells to which it attends is 1.
    """

    logits: torch.Tensor | None = None
    maps: Mapping[int, torch.Tensor] = field(default_factory=dict)
    tokens: Mapping[int, torch.Tensor] = field(default_factory=dict)
    attention: Mapping[int, torch.Tensor] = field(default_factory=dict)


class Side(NamedTuple):
    """What a term knows about the student or the teacher.

    Attributes:
        key: the key of the configuration, for messages.
        channels: of every level (C_i).
        has_logits: whether there is a head.
        has_attention: whether the backbone gives its attention.
    """

    key: str
    channels: Sequence[int]
    has_logits: bool
    has_attention: bool

    @classmethod
    def of(cls, key: str, backbone: Backbone, has_logits: bool) -> Side:
        """Describe a model."""
        return cls(key, backbone.level_channels, has_logits, type(backbone).attention is not Backbone.attention)

    def level(self, number: int) -> int:
        """The number of a level from 0; negative ones count from the end.

        Raises:
            ConfigError: there is no such level.
        """
        total = len(self.channels)
        if not -total <= number < total:
            raise ConfigError(f"model.distillation: {self.key} has levels 0 to {total - 1}, not {number}")
        return number % total


class Term(nn.Module):
    """Base class of the terms; one of yours: ``model.distillation=[{_target_: <its path>, weight: 1.0, <its keys>}]``.

    A subclass passes ``student``, ``teacher`` and ``weight`` on, and writes :meth:`forward`.

    Args:
        student: set by exp.
        teacher: set by exp.
        weight: factor of the term in the sum; 0: it is measured at most.
        levels: pairs of a level of the student and one of the teacher.
    """

    name: str = "loss_distillation"
    """Of the loss in ``metrics.jsonl``; terms of one name are added up."""
    needs: ClassVar[str] = ""
    """``logits``, ``features`` or ``attention``; empty: nothing of the teacher."""

    def __init__(
        self, student: Side, teacher: Side, weight: float = 1.0, levels: Sequence[Sequence[int]] = ((-1, -1),)
    ) -> None:
        super().__init__()
        if weight < 0.0:
            raise ConfigError(f"model.distillation: weight={weight} of {type(self).__name__} must not be negative")
        for side in (student, teacher) if self.needs in ("logits", "attention") else ():
            if not getattr(side, f"has_{self.needs}"):
                missing = "head with scores of classes" if self.needs == "logits" else "method attention"
                raise ConfigError(f"model.distillation: {type(self).__name__} needs both networks, and {side.key} has "
                                  f"no {missing}")  # fmt: skip
        self.weight = weight
        has_levels = self.needs in ("features", "attention")
        self.levels = [(student.level(index), teacher.level(other)) for index, other in levels if has_levels]
        if has_levels and not self.levels:
            raise ConfigError(f"model.distillation: {type(self).__name__}.levels is empty; name pairs, as [[-1, -1]]")

    def forward(self, student: Outputs, teacher: Outputs) -> torch.Tensor:
        """The loss without its weight: 0-dim float32, a mean over samples."""
        raise NotImplementedError


class Labels(Term):
    """The student's own losses, of ``model.losses`` and of an auxiliary head; without this term labels do not count."""


class Logits(Term):
    """Kullback-Leibler divergence of softened scores, times the square of the temperature.

    As in Hinton et al., arXiv 1503.02531. The mean over images or pixels, also those whose label is ignored or missing.

    Args:
        temperature: divides the scores; the higher, the more the smaller ones count.
        **common: arguments of :class:`Term`.
    """

    name, needs = "loss_logits", "logits"

    def __init__(self, temperature: float = 4.0, **common: Any) -> None:
        super().__init__(**common)
        if temperature <= 0.0:
            raise ConfigError(f"model.distillation: temperature={temperature} of Logits must be above 0")
        self.temperature = temperature

    def forward(self, student: Outputs, teacher: Outputs) -> torch.Tensor:
        """See :class:`Term`."""
        student_logits, teacher_logits = (
            torch.log_softmax(_present(outputs.logits).float() / self.temperature, dim=1)
            for outputs in (student, teacher)
        )
        return (teacher_logits.exp() * (teacher_logits - student_logits)).sum(dim=1).mean() * self.temperature**2


class FeatureMaps(Term):
    """Distance of the student's projected features from the teacher's.

    The targets are the teacher's features after a layer norm without parameters (Wei et al., arXiv 2205.14141), so that
    distances do not depend on the teacher's scale; its maps are interpolated to the student's grid. A linear layer for
    each pair of levels projects the student's features to the teacher's width.

    Args:
        part: ``patches``: every cell of a map; ``cls``: the CLS token, without one the mean of the map.
        cosine: factor of one minus the cosine.
        mse: factor of the mean squared distance.
        smooth_l1: factor of the smooth L1 distance.
        dropout: probability of dropping a student's element before the projection.
        **common: arguments of :class:`Term`.
    """

    needs = "features"

    def __init__(
        self, part: str = "patches", cosine: float = 1.0, mse: float = 0.0, smooth_l1: float = 0.0,
        dropout: float = 0.0, **common: Any,
    ) -> None:  # fmt: skip
        super().__init__(**common)
        if part not in ("patches", "cls"):
            raise ConfigError(f"model.distillation: part={part} of FeatureMaps is not one of patches, cls")
        if min(cosine, mse, smooth_l1) < 0.0 or not cosine + mse + smooth_l1:
            raise ConfigError("model.distillation: cosine, mse and smooth_l1 of FeatureMaps must not be negative, nor "
                              "all 0")  # fmt: skip
        self.part, self.name = part, f"loss_{part}"
        self.cosine, self.mse, self.smooth_l1 = cosine, mse, smooth_l1
        student, teacher = common["student"], common["teacher"]
        self.dropout = Dropout(dropout)
        self.project = nn.ModuleList(
            nn.Linear(student.channels[index], teacher.channels[other]).requires_grad_(self.weight > 0.0)
            for index, other in self.levels
        )

    def forward(self, student: Outputs, teacher: Outputs) -> torch.Tensor:
        """See :class:`Term`; the mean over the pairs of levels."""
        return _mean([self._distance(*pair) for pair in self._pairs(student, teacher)])

    def similarity(self, student: Outputs, teacher: Outputs) -> torch.Tensor:
        """The cosine for each image, (B,)."""
        return _mean([_by_image(_cosine(*pair)) for pair in self._pairs(student, teacher)])

    def _pairs(self, student: Outputs, teacher: Outputs) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """For each pair of levels the projected student and the target: (B, ..., C) both, float32."""
        for project, (index, other) in zip(self.project, self.levels):
            if self.part == "cls":
                student_map, teacher_map = student.tokens[index], teacher.tokens[other].float()
            else:
                student_map = student.maps[index].permute(0, 2, 3, 1)
                teacher_map = _resized(teacher.maps[other].float(), student_map.shape[1:3]).permute(0, 2, 3, 1)
            yield project(self.dropout(student_map)), F.layer_norm(teacher_map, teacher_map.shape[-1:])

    def _distance(self, student_map: torch.Tensor, teacher_map: torch.Tensor) -> torch.Tensor:
        distances: list[torch.Tensor] = []
        if self.cosine:
            distances.append(self.cosine * (1.0 - _by_image(_cosine(student_map, teacher_map)).mean()))
        if self.mse:
            distances.append(self.mse * F.mse_loss(student_map, teacher_map))
        if self.smooth_l1:
            distances.append(self.smooth_l1 * F.smooth_l1_loss(student_map, teacher_map))
        return sum(distances[1:], distances[0])


class Attention(Term):
    """Kullback-Leibler divergence of the attention between cells, the mean over heads and over cells.

    As MiniLM (arXiv 2002.10957) does it for text. If the two have other grids, the teacher's weights are interpolated
    to the cells of the student, and to those to which it attends. Both networks are run a second time.
    """

    name, needs = "loss_attention", "attention"

    def forward(self, student: Outputs, teacher: Outputs) -> torch.Tensor:
        """See :class:`Term`; the mean over the pairs of levels."""
        losses = []
        for index, other in self.levels:
            student_scores, teacher_scores = student.attention[index], teacher.attention[other]
            target = _resized_attention(teacher_scores, student_scores.shape[1:])
            divergence = target * ((target + _EPS).log() - (student_scores.flatten(3) + _EPS).log())
            losses.append(divergence.sum(dim=-1).mean())
        return _mean(losses)


class Distillation(nn.Module):
    """The terms of ``model.distillation``, and the teacher.

    Args:
        terms: {_target_, weight, ...} each.
        teacher: of :mod:`exp.vision.teachers`.
        student: the student.
        computed: levels that the student computes; later ones are not trained.

    Attributes:
        levels: of the student, whose features terms need.
        attention_levels: of the student, whose attention terms need.
        label_weight: factor of the student's own losses; 0: they are not computed.
        needs_logits: whether a term needs the student's scores.

    Raises:
        ConfigError: no term has a weight, or one does not fit the networks.
    """

    def __init__(self, terms: Sequence[Any], teacher: Any, student: Side, computed: int) -> None:
        super().__init__()
        self._teachers = [teacher]  # a list hides it from nn.Module
        self.terms: Any = nn.ModuleList(
            create(config, Term, f"model.distillation[{number}]", student=student, teacher=teacher.side)
            for number, config in enumerate(terms)
        )
        if not any(term.weight for term in self.terms):
            raise ConfigError("model.distillation: at least one term must have a weight above 0")
        self.label_weight = sum(term.weight for term in self.terms if isinstance(term, Labels))
        self.needs_logits = any(term.weight and term.needs == "logits" for term in self.terms)
        self.levels, self._teacher_levels = self._levels_of("features")
        self.attention_levels, self._teacher_attention = self._levels_of("attention")
        beyond = [level for level in (*self.levels, *self.attention_levels) if level >= computed]
        if beyond:
            raise ConfigError(
                f"model.distillation: the student's level {beyond[0]} comes after those of model.backbone.out_indices, "
                "and is not trained"
            )

    def _levels_of(self, need: str) -> tuple[list[int], list[int]]:
        """The levels of student and teacher that terms with this need compare."""
        pairs = [pair for term in self.terms if term.needs == need for pair in term.levels]
        return sorted({index for index, _ in pairs}), sorted({other for _, other in pairs})

    @property
    def teacher(self) -> Any:
        """The teacher."""
        return self._teachers[0]

    def check_data(self, state: Mapping[str, Any]) -> list[str]:
        """Compare the data of a student with those of its teacher; returns warnings.

        Args:
            state: of the student's data (:meth:`exp.vision.data.base.ImageData.state_dict`).

        Raises:
            ConfigError: a term compares scores, and the teacher has other classes, or another order of them.
        """
        teacher_data, source = self.teacher.data, self.teacher.source
        old, new = list(teacher_data.get("classes", ())), list(state["classes"])
        if self.needs_logits and old != new:
            raise ConfigError(
                f"model.teacher.init_from={source} knows the classes {shortened(old)}, the data have {shortened(new)}",
                "Logits compares them one by one: use the same in the same order (data.classes), or leave out Logits",
            )
        keys = [key for key in ("value_range", "bands") if teacher_data and teacher_data.get(key) != state.get(key)]
        return [
            f"the teacher was trained with data.{key}={teacher_data.get(key)}, not {state.get(key)}" for key in keys
        ]

    def targets(self, batch: Mapping[str, torch.Tensor]) -> Outputs:
        """The teacher's outputs for a batch."""
        return self.teacher.targets(batch, self._teacher_levels, self._teacher_attention, self.needs_logits)

    def forward(
        self, student: Outputs, batch: Mapping[str, torch.Tensor], own: Callable[[], dict[str, torch.Tensor]]
    ) -> dict[str, torch.Tensor]:
        """All losses by name, each times its weight.

        Args:
            student: outputs of the student.
            batch: for the teacher: ``image`` (B, C, H, W), or what a store has added.
            own: computes the student's own losses.
        """
        losses = {name: self.label_weight * loss for name, loss in own().items()} if self.label_weight else {}
        terms = [term for term in self.terms if term.weight and term.needs]
        targets = self.targets(batch) if terms else Outputs()
        with autocast_disabled(batch["image"].device.type):
            for term in terms:
                loss = term.weight * term(student, targets)
                losses[term.name] = losses[term.name] + loss if term.name in losses else loss
        return losses

    def similarity(self, student: Outputs, batch: Mapping[str, torch.Tensor]) -> CosineSimilarity:
        """The cosines of projected student and teacher for each image, of the first term of each part.

        Raises:
            ConfigError: no term compares CLS tokens, or none patches.
        """
        first = {term.part: term for term in reversed(self.terms) if isinstance(term, FeatureMaps)}
        if len(first) < 2:
            raise ConfigError(
                "model.distillation: a student without head is measured by cosines of CLS token and patches; name "
                "a FeatureMaps with part=cls and one with part=patches, if need be with weight: 0"
            )
        targets = self.targets(batch)
        with autocast_disabled(batch["image"].device.type):
            cls, patches = (first[part].similarity(student, targets) for part in ("cls", "patches"))
        return CosineSimilarity(cls, patches)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the terms and the teacher in place."""
        for term in self.terms:
            term.compile(*args, **kwargs)
        self.teacher.compile(*args, **kwargs)


def _present(logits: torch.Tensor | None) -> torch.Tensor:
    assert logits is not None
    return logits


def _resized_attention(weights: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """(B, h, w, h', w') -> (B, *shape[:2], cells), interpolated to ``shape`` (four sides); sums are 1 again."""
    batch, height, width, rows, columns = weights.shape
    queries = weights.reshape(batch, height, width, rows * columns).permute(0, 3, 1, 2)
    queries = _resized(queries, shape[:2]).permute(0, 2, 3, 1)
    keys = _resized(queries.reshape(batch, shape[0] * shape[1], rows, columns), shape[2:])
    cells = keys.reshape(batch, shape[0], shape[1], shape[2] * shape[3])
    return cells / (cells.sum(dim=-1, keepdim=True) + _EPS)


def _resized(maps: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    """Interpolate (B, C, h, w) to (B, C, *size)."""
    if maps.shape[2:] == tuple(size):
        return maps
    return F.interpolate(maps, size=list(size), mode="bilinear", align_corners=False)


def _cosine(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Cosine similarity over the last axis, from operators that every device has."""
    norms = (a.square().sum(dim=-1) + _EPS) * (b.square().sum(dim=-1) + _EPS)
    return (a * b).sum(dim=-1) * norms.rsqrt()


def _by_image(values: torch.Tensor) -> torch.Tensor:
    """The mean for each image: (B,) or (B, h, w) -> (B,)."""
    return values if values.dim() == 1 else values.mean(dim=(1, 2))


def _mean(values: Sequence[torch.Tensor]) -> torch.Tensor:
    return sum(values[1:], values[0]) / len(values) if len(values) > 1 else values[0]
