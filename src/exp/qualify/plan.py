"""Which rows there are, in the order of their worth: what fits into the budget is made first to last."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any, Iterator, Mapping, Sequence

from hydra.errors import HydraException

from exp.config.check import validate
from exp.config.explain import explain
from exp.errors import ConfigError
from exp.freezing import compose, prepare
from exp.plugins import installed

if TYPE_CHECKING:
    from exp.backend import Backend
    from exp.config.schema import ExpConfig
    from exp.tasks.qualify import Qualify

__all__ = ["Row", "plan"]

_SHORT = ("plots=false", "logger=none", "debug.val_batches=1", "debug.test_batches=1", "max_epochs=null")
_OWN = re.compile(
    r"[+~]*(?:task|experiment|nproc|precision|output_dir|overwrite|resume|steps|reference|max_steps|max_epochs|logger)"
    r"(?:[.=].*)?"
)
_NEVER = "val_every=10000000"
_SIMULATED_KIB = "[4,64,1024]"
_SOAK = ("max_steps=10000000", _NEVER, "log_every=10", "checkpoint.every_epochs=0", "checkpoint.every_steps=0")


@dataclass(frozen=True)
class Row:
    """One row of the kit.

    Attributes:
        name: what it is called, and its folder.
        kind: which judge it has, and how it is made (:mod:`exp.qualify.rows`).
        title: for people.
        overrides: of ``python -m exp``, without ``output_dir``.
        about: what it varies: ``experiment``, ``precision``, ``nproc``.
    """

    name: str
    kind: str
    title: str
    overrides: Sequence[str]
    about: Mapping[str, Any] = field(default_factory=dict)


def plan(config: ExpConfig, overrides: Sequence[str], task: Qualify, backend: Backend) -> list[Row]:
    """All rows.

    Args:
        config: with the backend that was chosen.
        overrides: the user's; what concerns hardware and data holds for every row.
        task: of ``config``.
        backend: likewise.

    Raises:
        ConfigError: an experiment cannot be trained as the user has it, or ``task.rows`` names no row.
    """
    rows = list(_Plan(config, overrides, task, backend).rows())
    for pattern in task.rows or ():
        if not any(fnmatch(row.name, pattern) for row in rows):
            raise ConfigError(f"task.rows: no row is called {pattern}; there are {', '.join(row.name for row in rows)}")
    return rows


class _Plan:
    def __init__(self, config: ExpConfig, overrides: Sequence[str], task: Qualify, backend: Backend) -> None:
        kept = [override for override in overrides if not _OWN.fullmatch(override)]
        if not any(override.startswith("backend=") for override in kept):
            kept.append(f"backend={config.backend.name}")
        self.kept = [f"backend={config.backend.name}" if each == "backend=auto" else each for each in kept]
        self.nproc = config.nproc
        self.task = task
        self.backend = backend
        self.made_up = backend.simulate or not backend.exclusive_devices
        examples = {family.example: family.small for plugin in installed().values()
                    for family in plugin.families.values()}  # fmt: skip
        wanted = list(examples) if task.experiments is None else task.experiments
        self.experiments = {name: list(examples.get(name, ())) for name in wanted}
        self.small = self.made_up if task.small is None else task.small
        self.by_card = any(override.lstrip("+").startswith("batch_size=") for override in self.kept)
        self.batches = {name: self._composed(name) for name in self.experiments}

    def _composed(self, experiment: str) -> tuple[int, int]:
        """Samples of an optimizer step on one card, and micro-batches, of an experiment as the user has it.

        One that cannot be trained so is found here, before the first row.
        """
        overrides = [*self.kept, f"experiment={experiment}", *_SHORT, "task=speed", "max_steps=100", "nproc=1"]
        try:
            config = prepare(compose(overrides), overrides)
            validate(config, overrides, self.backend)
        except (HydraException, ConfigError) as error:
            found = str(error) if isinstance(error, ConfigError) else explain(error, [])
            raise ConfigError(f"the rows of {experiment} cannot be made: {found}") from error
        assert config.global_batch_size is not None  # derived where it was not given
        return config.global_batch_size, config.accumulate

    def _batch(self, experiment: str, settings: Sequence[str], nproc: int, by_card: bool = False) -> list[str]:
        """``settings`` with a global batch that ``nproc`` cards can share.

        Args:
            experiment: whose it is.
            settings: may have the batch of the small form.
            nproc: number of cards.
            by_card: each card has the whole batch; else all share it, and it is rounded up.
        """
        others = [each for each in settings if not each.startswith("global_batch_size=")]
        if self.by_card:  # the user's word, for any number of cards
            return others
        own = [int(each.partition("=")[2]) for each in settings if each not in others]
        samples, accumulate = self.batches[experiment]
        parts = accumulate * (1 if by_card else nproc)
        shared = -(-(own or [samples])[-1] // parts) * parts
        return [*others, f"global_batch_size={shared * (nproc if by_card else 1)}"]

    def rows(self) -> Iterator[Row]:
        """In order."""
        yield self._row("doctor", "doctor", "ranks, cards and group", "task=doctor", *self._any(), nproc=self.nproc)
        yield from self._operators(self.backend.precisions[:1])
        yield from self._collectives()
        for nproc in dict.fromkeys((1, self.nproc)):
            for name, small in self.experiments.items():
                settings = ["task=parity", "steps=5", "max_steps=5", *self._batch(name, small, nproc)]
                yield self._trained("parity", name, settings, nproc=nproc)
        yield from self._operators(self.backend.precisions[1:])
        for name, small in self.experiments.items():
            for nproc in self._counts():
                fewer = self._batch(name, small if self.small else (), nproc, by_card=True)
                settings = ["task=speed", f"max_steps={self.task.steps}", _NEVER, *fewer]
                yield self._trained("speed", name, settings, nproc=nproc)
        for name, small in list(self.experiments.items())[:1]:
            settings = ["task=train", "max_steps=8", "log_every=1", "checkpoint.every_steps=3"]
            settings += ["launcher.max_restarts=0", *self._batch(name, small, self.nproc)]
            yield self._trained("resume", name, settings, nproc=self.nproc)
            if self.task.soak_minutes > 0:
                fewer = self._batch(name, small if self.small else (), self.nproc)
                yield self._trained("soak", name, ["task=train", *_SOAK, *fewer], nproc=self.nproc)

    def _any(self) -> list[str]:
        """For rows that train nothing: keys of the user's may be of his experiments only."""
        return [f"experiment={name}" for name in self.experiments][:1]

    def _counts(self) -> list[int]:
        """1, 2, 4, ... and all cards."""
        return [*(2**power for power in range(20) if 2**power < self.nproc), self.nproc]

    def _operators(self, precisions: Sequence[str]) -> Iterator[Row]:
        for precision in precisions:
            for name, small in self.experiments.items():
                settings = ["task=operators", "max_steps=1", *self._batch(name, small, 1)]
                yield self._trained("operators", name, settings, precision=precision)

    def _collectives(self) -> Iterator[Row]:
        settings = ["task=collectives", "launcher.timeout_s=60", *self._any()]
        settings += [f"task.sizes_kib={_SIMULATED_KIB}"] if self.made_up else []
        if self.nproc > 1:
            yield self._row("collectives", "collectives", "sums and their speed", *settings, nproc=self.nproc)
            if self.backend.exclusive_devices and not self.backend.gloo_carries_device:
                staged = [*settings, "backend.process_group=gloo"]
                title = "the same through the CPU"
                yield self._row("collectives-staged", "collectives", title, *staged, nproc=self.nproc)

    def _trained(self, kind: str, experiment: str, settings: Sequence[str], **about: Any) -> Row:
        place = "-".join(str(value) for value in about.values())
        title = {"precision": "{}", "nproc": "{} cards"}[next(iter(about))].format(place).replace("1 cards", "1 card")
        overrides = [f"experiment={experiment}", *_SHORT, *settings]
        return self._row(
            f"{kind}-{experiment}-{place}", kind, f"{experiment}, {title}", *overrides, experiment=experiment, **about
        )

    def _row(self, name: str, kind: str, title: str, *settings: str, **about: Any) -> Row:
        about.setdefault("precision", "fp32")
        about.setdefault("nproc", 1)
        own = [f"precision={about['precision']}", f"nproc={about['nproc']}"]
        return Row(name, kind, title, [*self.kept, *settings, *own], about)
