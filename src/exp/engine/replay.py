"""Finds silent corruption: computes a step again, and compares all outputs and gradients bit by bit.

The last micro-batch of a step is computed again with the same random numbers and buffers: by the same rank and, if all
ranks have the same weights and cards of one kind, by its neighbor, which finds a card that is always wrong. This
happens before gradients are exchanged, and does not change the state of the training. Bits are compared by a hash that
is computed on the device.
"""

from __future__ import annotations

import io
import itertools
from typing import TYPE_CHECKING, Any, NamedTuple, Sequence

import torch
import torch.distributed as dist
from torch import nn

from exp.data.loader import map_tensors, tensors_of
from exp.distributed import rng_state, set_rng_state
from exp.engine.checkpoint.reader import list_checkpoints, step_of
from exp.engine.wrapper import forward, has_own_step, is_sharded, preprocessed, unwrapped
from exp.errors import ConfigError, RunError, first_line, qualified_name
from exp.hardware.cards import monitor_row
from exp.hardware.compat import supports_replay
from exp.runs.heartbeat import Stage, report_stage

if TYPE_CHECKING:
    from exp.models.dropout import DropoutStream
    from exp.session import Session

_KEY = "debug.replay_every"


class _Case(NamedTuple):
    """All that a micro-batch is computed from, except the weights, and the digests of what came out."""

    batch: dict[str, Any]
    rng: dict[str, Any]
    buffers: dict[str, torch.Tensor]
    dropout: tuple[int, int, int]  # step, first sample and number of samples of the DropoutStream
    seed: torch.Tensor  # gradient of the loss, such as the scale of a loss scaler
    digests: list[tuple[str, str, int]]  # kind (weights, output, gradient), name and digest, in order of computation


class StepReplay:
    """Computes the last micro-batch of every so many steps again, and ends the run if a bit differs.

    The first step in this process is computed again, too: if that differs, the model is not deterministic.

    Args:
        session: has the device, the process group and ``debug.replay_every``.
        model: the wrapped model.
        optim_wrapper: the :class:`exp.engine.optim.BackendOptimWrapper`, which calls :meth:`watch` and :meth:`check`.
        dropouts: of the training; None: there are none.

    Attributes:
        checked: steps that were computed again with the same result.

    Raises:
        ConfigError: torch is too old, or the model cannot be computed again.
    """

    def __init__(self, session: Session, model: nn.Module, optim_wrapper: Any, dropouts: DropoutStream | None) -> None:
        self.session, self.model, self.optim, self.dropouts = session, unwrapped(model), optim_wrapper, dropouts
        self.every, self.step = session.config.debug.replay_every or 1, 0
        self.checked: list[int] = []
        bare, reason = self.model, None
        if not supports_replay():
            reason = f"it needs torch 2.0 or later, and this is {torch.__version__}"
        elif is_sharded(bare):
            reason = "with wrapper=fsdp no rank has the weights to compute a step alone; use wrapper=ddp"
        elif has_own_step(bare):
            reason = f"{qualified_name(bare)} has a train_step of its own, which changes the weights between its passes"
        if reason is not None:
            raise ConfigError(f"{_KEY}: {reason}", "leave it out", key=_KEY)
        kinds = {(device["name"], device.get("cores"), device.get("backend")) for device in session.devices}
        waits = any(isinstance(module, nn.SyncBatchNorm) for module in bare.modules())
        self._has_neighbor = model is not bare and len(kinds) == 1 and not waits
        self._parameters: dict[str, nn.Parameter] = {}
        self._case: _Case | None = None
        self._hooks: list[Any] = []
        self._digests: list[tuple[str, str, torch.Tensor]] = []

    # -- the step itself -------------------------------------------------------------------------------------------

    def begin(self, batch: dict[str, Any], step: int) -> None:
        """If the step is due, keep what its last micro-batch is computed from, and record what comes out.

        Args:
            batch: on the device.
            step: number of the step, from 1.
        """
        if self.checked and step % self.every:
            return
        self.step, streams = step, self.dropouts
        dropout = (0, 0, 0) if streams is None else (streams.step, streams.first, streams.size)
        state = self._state()
        self._case = _Case(self._copied(batch), *state, dropout, torch.ones(()), [])
        self._record()
        self._parameters = {name: each for name, each in self.model.named_parameters() if each.requires_grad}
        for name, parameter in self._parameters.items():
            hook = parameter.register_hook(lambda gradient, name=name: self._add("gradient", name, gradient))
            self._hooks.append(hook)

    def watch(self, loss: torch.Tensor) -> None:
        """Keep the gradient of a loss (0-dim, not scaled yet), with which the replay begins its backward pass."""
        if self._case is not None:
            self._hooks.append(loss.register_hook(self._keep_seed))

    def _keep_seed(self, gradient: torch.Tensor) -> None:
        assert self._case is not None
        self._case = self._case._replace(seed=gradient.detach())

    # -- its repetition --------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Compute the micro-batch again if it was recorded; called before gradients are exchanged. A collective.

        Raises:
            ConfigError: the first step of this process differs.
            RunError: a later one differs, or a neighbor computes something else.
        """
        if self._case is None:
            return
        report_stage(Stage.FREE)  # no time limit
        case, self._case = self._case._replace(digests=self._read()), None
        state = self._state()
        differences: list[Any] = [None, None]
        try:
            for index, other in enumerate([case, self._from_next(case)] if self._has_neighbor else [case]):
                pairs = itertools.zip_longest(other.digests, self._compute(other))
                differences[index] = next(((one or two)[:2] for one, two in pairs if one != two), None)
            own, neighbors = zip(*self.session.distributed.gather(differences))
            if any(own) and not self.checked:
                raise self._not_deterministic(case, own)
            if any(own) or any(neighbors):
                raise self._corrupted(own, neighbors)
        finally:
            self._restore(*state)
        self.checked.append(self.step)
        report_stage(Stage.BACKWARD)

    def _compute(self, case: _Case) -> list[tuple[str, str, int]]:
        """The digests of a case, computed here; gradients are in the order of the case's own."""
        self._restore(case.rng, case.buffers)
        if self.dropouts is not None:
            step, first, size = case.dropout
            self.dropouts.begin(step, 0, size=size)
            self.dropouts.first = first
        self._record()
        bare: Any = self.model
        with self.optim.backend.autocast(self.optim.precision):
            losses = forward(bare, preprocessed(bare, self._copied(case.batch), training=True), "loss")
        loss, _ = bare.parse_losses(losses)
        with self.optim.during_backward():  # not backward(), which would add up gradients, and start DDP's exchange
            seed = case.seed.to(loss.device)
            values = torch.autograd.grad(loss, [*self._parameters.values()], seed, allow_unused=True)
        gradients = dict(zip(self._parameters, values))
        names = [name for kind, name, _ in case.digests if kind == "gradient"]
        for name in dict.fromkeys([*names, *gradients]):
            self._add("gradient", name, gradients[name])
        return self._read()

    def _from_next(self, case: _Case) -> _Case:
        """The case of the next rank; this rank's goes to the one before. A collective."""
        group, content = self.session.distributed, io.BytesIO()
        torch.save(case, content)
        sent, following = torch.frombuffer(content.getbuffer(), dtype=torch.uint8), (group.rank + 1) % group.world_size
        received = torch.empty(group.gather(len(sent))[following], dtype=torch.uint8)
        requests: list[Any] = [
            dist.isend(sent, (group.rank - 1) % group.world_size, group=group.cpu_group),
            dist.irecv(received, following, group=group.cpu_group),
        ]
        for request in requests:
            request.wait()
        # A file of this run's own rank, not of a user.
        other: _Case = torch.load(io.BytesIO(received.numpy().tobytes()), map_location="cpu", weights_only=False)
        return other

    def _state(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        buffers = {name: buffer.detach().clone() for name, buffer in self.model.named_buffers()}
        return rng_state(self.session.backend), buffers

    def _restore(self, rng: dict[str, Any], buffers: dict[str, torch.Tensor]) -> None:
        set_rng_state(rng, self.session.backend)
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                buffer.copy_(buffers[name])

    def _copied(self, batch: dict[str, Any]) -> dict[str, Any]:
        """A copy of a batch on the device, since a model may change its input."""
        return map_tensors(lambda each: each.to(self.session.device, copy=True), batch)  # type: ignore[no-any-return]

    # -- digests ---------------------------------------------------------------------------------------------------

    def _record(self) -> None:
        """Begin a record: the weights, if a neighbor has the same, and outputs as they are computed."""
        for name, module in self.model.named_modules():
            hook = module.register_forward_hook(lambda _module, _inputs, out, name=name: self._add("output", name, out))
            self._hooks.append(hook)
        for name, parameter in self.model.named_parameters() if self._has_neighbor else ():
            self._add("weights", name, parameter)

    def _add(self, kind: str, name: str, values: Any) -> None:
        self._digests += [(kind, name, _digest(tensor)) for tensor in tensors_of(values)]

    def _read(self) -> list[tuple[str, str, int]]:
        """End a record; waits for the device once."""
        while self._hooks:
            self._hooks.pop().remove()
        names, self._digests = self._digests, []
        values = torch.stack([digest.to(self.session.device) for _, _, digest in names]).cpu().tolist()
        return [(kind, name, value) for (kind, name, _), value in zip(names, values)]

    # -- what was found --------------------------------------------------------------------------------------------

    def _not_deterministic(self, case: _Case, own: Sequence[Any]) -> ConfigError:
        """The refusal, with the operator that torch knows to be not deterministic. A collective."""
        operator = None
        torch.use_deterministic_algorithms(True)
        try:
            self._compute(case)
        except RuntimeError as error:
            operator = first_line(error)
        torch.use_deterministic_algorithms(False)
        operators = self.session.distributed.gather(operator)
        rank, difference = next((rank, each) for rank, each in enumerate(own) if each)
        reason = f"; torch reports: {operators[rank]}" if operators[rank] else ""
        return ConfigError(
            f"{_KEY}: rank {rank} got two results for step {self.step}, so this model is not deterministic here: first "
            f"{_place(difference)} differs{reason}",
            "use deterministic operators there, draw random numbers from torch's global generators only, and count no "
            "calls; or leave the key out",
            key=_KEY,
            rank=rank,
        )

    def _corrupted(self, own: Sequence[Any], neighbors: Sequence[Any]) -> RunError:
        """The error with rank, card and module. A collective."""
        session, details = self.session, []
        device = session.devices[session.info.rank]
        row = monitor_row(device, session.backend.monitor()) or {}
        serials = session.distributed.gather(device.get("serial") or row.get("serial"))
        # Rank r has computed the batch of r + 1: a rank that is wrong differs from both of its neighbors.
        counts = [bool(neighbors[rank]) + bool(neighbors[rank - 1]) for rank in range(len(own))]
        wrong = [rank for rank in range(len(own)) if (own[rank] if any(own) else counts[rank] == max(counts))]
        how = "two results" if any(own) else "another result than its neighbors"
        if len(wrong) > 1 and not any(own):
            details.append("from so few ranks it is not known which is wrong")
        last = max(self.checked, default=0)
        good = next((path for path in list_checkpoints(session.folder.checkpoints) if step_of(path) <= last), None)
        advice = f"resume={good} is before that" if good else "no checkpoint is before that"
        details.append(f"the last step that had the same result again is {last or 'none'}; {advice}")
        cards = [
            f"rank {rank} ({session.devices[rank]['device']}, {session.devices[rank]['name']}"
            f"{f', serial {serials[rank]}' if serials[rank] else ''}, on {session.devices[rank]['host']})"
            for rank in wrong
        ]
        place = _place(next(filter(None, (*own, *neighbors))))
        return RunError(
            f"{' or '.join(cards)} got {how} for step {self.step}: first {place} differs",
            "a card, its memory or its driver corrupts results: check it with task=doctor and task=qualify, and leave "
            "it out until it is repaired",
            details,
            rank=wrong[0],
        )


def _digest(tensor: torch.Tensor) -> torch.Tensor:
    """A hash of a tensor's bits, 0-dim int32 on its device. One flipped bit always changes it.

    It is the sum of the bits as integers, modulo 2**32, each multiplied by an odd number that depends on its position.
    """
    values = tensor.detach().to_dense() if tensor.layout != torch.strided else tensor.detach()
    values = torch.view_as_real(values) if values.is_complex() else values
    kind = {1: torch.uint8, 2: torch.int16}.get(values.element_size(), torch.int32)
    bits = values.contiguous().reshape(-1).view(kind).to(torch.int32)
    factors = torch.arange(bits.numel(), dtype=torch.int32, device=bits.device).mul_(2).add_(1)
    return (bits * factors).sum(dtype=torch.int32)


def _place(difference: tuple[str, str]) -> str:
    kind, name = difference
    return f"the {kind} of {name or 'the model'}"
