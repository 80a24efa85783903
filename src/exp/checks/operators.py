"""task=operators: compares every operator of a training step, forward and backward, with the CPU.

The experiment trains a few steps on the device, and every operator that torch dispatches is intercepted, also those
with portable kernels. Each operator runs first on the CPU, on copies of its inputs, then on the device, and the results
are compared. If the device raises an error, the training continues with the CPU's result, so that one defect does not
hide the next.

Operators may be wrong only together: one leaves the card in a state in which another one errs, or small errors add up.
So the first step is repeated as a whole, with some operators on the device and all others on the CPU
(:class:`StepSearch`). If it is wrong with all on the device, a search names the smallest sets that make it wrong.
"""

from __future__ import annotations

import contextlib
import math
import time
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Callable, Collection, Container, Iterator, Sequence

import numpy as np
import torch
from mmengine.hooks import Hook

from exp.checks.check import LIMITS_S, STEP, Journal, operator_status
from exp.checks.measure import train_with
from exp.checks.parity import allowed_differences, max_abs, max_difference
from exp.data.loader import map_tensors, tensors_of
from exp.distributed import rng_state, set_rng_state
from exp.engine.optim import BackwardOnly
from exp.engine.result import make_result
from exp.engine.wrapper import unwrapped
from exp.errors import first_line, typed_line, typed_message
from exp.hardware.compat import dispatch_mode

if TYPE_CHECKING:
    from exp.hardware.backend import Backend
    from exp.session import Session


_MAX_SIGNATURES = 8
"""Number of signatures (shapes, dtypes, devices) per operator that are compared; calls with others just run."""
_FLOOR = 1e-3
"""Lower bound of the scale of a relative difference, as a share of the largest input: a sum that cancels to zero has no
scale of its own."""
_SEARCH_S = 240.0
"""After this time a search ends, with the smallest sets so far."""
_UNINITIALIZED = ("empty", "new_empty", "resize_", "set_", "_pin_memory", "is_pinned")


def check_operators(session: Session) -> dict[str, Any]:
    """Train ``max_steps`` steps and compare every operator; writes the results to ``operators.jsonl``.

    Returns:
        The content of ``result.json``.
    """
    journal = Journal(session.folder.path / "operators.jsonl", LIMITS_S["operators"])
    check = OperatorCheck(session.backend, session.device, journal, session.kernels.portable, session.config.precision)
    return make_result(session, {}, None, steps=train_with(session, check))


class OperatorCheck(Hook):
    """Runs operators on the device and on the CPU, and records the differences of their results.

    As a hook it does so during each training step and validation batch only: between them, data loaders draw random
    numbers in a way that old torch versions cannot intercept. After the first step it looks for operators that are
    wrong together.

    Args:
        backend: backend of the device.
        device: device under test; calls without tensors of this device just run.
        journal: receives one line per operator and signature. Operators that crashed in an earlier attempt run only on
            the CPU.
        portable: ATen names of operators with a portable kernel (:mod:`exp.hardware.operators`).
        precision: of the training.

    Attributes:
        seen: by name of the operator, the signatures that were compared.
        on_cpu: names of operators that only run on the CPU, because the device cannot run them.
        uncompared: why the results of an operator are not compared, by its name.
        suspects: names of operators that were not equal.
    """

    priority = "VERY_LOW"

    def __init__(
        self, backend: Backend, device: torch.device, journal: Journal, portable: Container[str] = (),
        precision: str = "fp32",
    ) -> None:  # fmt: skip
        self.backend, self.device, self.journal = backend, device, journal
        self._portable, self.precision = portable, precision
        self.seen: dict[str, set[Any]] = {}
        self.on_cpu = set(journal.crashed)
        self.uncompared: dict[str, str] = {}
        self.suspects: dict[str, None] = {}
        self._window = contextlib.ExitStack()
        self._first_step: StepSearch | None = None

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        """Intercept operators; keep what repeats the first step."""
        if runner.iter == 0 and STEP not in self.journal.crashed:
            self._first_step = StepSearch(self, runner, data_batch)
        self.before_val_iter(runner, batch_idx)

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Stop intercepting; after the first step, repeat it."""
        self._window.close()
        if self._first_step is not None:
            self._first_step.search()
            self._first_step = None

    def before_val_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        """Intercept operators."""
        self._window.close()
        self._window.enter_context(dispatch_mode(self))

    def after_val_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Stop intercepting."""
        self._window.close()

    def __call__(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run one call of an operator, and compare it if its signature is new; returns its result."""
        if not self.concerns(func, args, kwargs):
            return func(*args, **kwargs)
        name = name_of(func)
        if name in self.on_cpu:
            return self.run_on_cpu(func, args, kwargs)
        seen, tensors = self.seen.setdefault(name, set()), tensors_of((args, kwargs))
        signature = tuple((tuple(tensor.shape), str(tensor.dtype), tensor.device.type) for tensor in tensors)
        if signature in seen or len(seen) >= _MAX_SIGNATURES:
            return func(*args, **kwargs)
        seen.add(signature)
        detail = ", ".join(f"{str(dtype)[6:]}{list(shape)}" for shape, dtype, _ in signature[:6])
        description: dict[str, Any] = {"detail": detail, "portable": _base_name(func) in self._portable}
        self.journal.begin(name, **description)
        return self._compare(name, partial(self.journal.end, name, **description), func, args, kwargs)

    def concerns(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Whether a call computes something on the device under test."""
        devices = {tensor.device.type for tensor in tensors_of((args, kwargs))}
        devices.update(torch.device(device).type for device in [kwargs.get("device")] if device is not None)
        return self.device.type in devices and not _computes_nothing(func)

    def run_on_cpu(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run one call of an operator on the CPU; returns the result that the device would return."""
        reference: Any = _copied_to_cpu((args, kwargs), _is_mutable(func))
        return self._on_device(func, args, kwargs, reference, func(*reference[0], **reference[1]))

    def _compare(
        self, name: str, record: Callable[..., None], func: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        inputs = [tensor for tensor in tensors_of((args, kwargs)) if tensor.is_floating_point()]
        scale = max((max_abs(tensor.detach().cpu().float().numpy()) for tensor in inputs), default=0.0)
        generator = kwargs.get("generator") or torch.default_generator
        seeds, expected, reason = generator.get_state(), None, ""
        reference: Any = _copied_to_cpu((args, kwargs), _is_mutable(func))
        try:
            expected = func(*reference[0], **reference[1])
        except Exception as error:  # noqa: BLE001 - the CPU may lack this kernel, and raise any exception
            # The text of torch's dispatcher goes on to name every kind of device.
            reason = "the CPU lacks it" if isinstance(error, NotImplementedError) else first_line(error) or repr(error)
        # It draws random numbers, so results differ. The CPU refuses a generator of a card.
        if generator is not torch.default_generator or not torch.equal(seeds, generator.get_state()):
            generator.set_state(seeds)
            reason = "random"
        before = self.backend.fallbacks()
        try:
            result = func(*args, **kwargs)
            self.backend.synchronize()
        except Exception as error:
            record(error=typed_line(error))
            if reason:
                raise
            self.on_cpu.add(name)
            return self._on_device(func, args, kwargs, reference, expected)
        fallbacks, after = None, self.backend.fallbacks()
        if before is not None and after is not None:  # calls and bytes
            fallbacks = [sum(counts[i] for counts in after.values()) - sum(counts[i] for counts in before.values())
                         for i in (0, 1)]  # fmt: skip
        if reason:
            self.uncompared[name] = reason
            record(left=fallbacks, uncompared=reason)
            return result
        on_device, on_cpu = _requested(result, args), _requested(expected, args)
        if _is_mutable(func):
            on_device, on_cpu = (result, args, kwargs), (expected, *reference)
        values = difference(on_device, on_cpu, _FLOOR * scale)
        if operator_status(values, self.precision) in ("wrong", "off"):
            self.suspects[name] = None
        record(left=fallbacks, **values)
        return result

    def _on_device(self, func: Any, args: Any, kwargs: Any, reference: Any, expected: Any) -> Any:
        """The CPU's result where the operator's would be: on its device, or in the arguments that it writes."""
        target = kwargs.get("device") or self.device
        written = _written(func, args, kwargs, reference)
        for copy, tensor in written.values():
            tensor.copy_(copy)
        return map_tensors(lambda value: written[id(value)][1] if id(value) in written else value.to(target), expected)


class StepSearch:
    """Repeats a training step, with chosen operators on the device and all others on the CPU.

    Parameters, buffers and random generators are those at the start of the step, and no update is made. The model is
    called as in the training, so that this works for any model.

    Args:
        check: knows the device, and which operators cannot run or be compared there.
        runner: the trainer, before the step.
        batch: the batch of the step, or its first micro-batch.
    """

    def __init__(self, check: OperatorCheck, runner: Any, batch: Any) -> None:
        self._check, self._runner, self._model = check, runner, unwrapped(runner.model)
        self._batch, self._start = map_tensors(torch.clone, batch), self._state()
        self._names: dict[str, None] = {}

    def search(self) -> None:
        """Write the smallest sets of operators that make the step wrong to the journal, and restore the training."""
        check, end, started = self._check, self._state(), time.monotonic()
        try:
            expected, allowed = self.run(()), allowed_differences(check.precision)
            limit_s = LIMITS_S["operators"] + 10 * (time.monotonic() - started)

            @lru_cache(maxsize=None)
            def is_wrong(names: frozenset[str]) -> bool:
                if time.monotonic() - started > _SEARCH_S:
                    return False
                check.journal.begin(STEP, limit_s, detail=f"with {len(names)} operators on the device")
                wrong = _is_wrong(self.run(names), expected, allowed)
                check.journal.end(STEP, wrong=wrong)
                return wrong

            names = [name for name in self._names if name not in check.uncompared and name not in check.on_cpu]
            found: dict[str, Any] = {"guilty": []}
            if is_wrong(frozenset(names)):
                if is_wrong(frozenset()):
                    found["uncompared"] = "it differs each time, also on the CPU"
                else:
                    found["guilty"] = find_guilty(names, check.suspects, lambda chosen: is_wrong(frozenset(chosen)))
            check.journal.end(STEP, **found)
        except Exception as error:  # noqa: BLE001 - a model of the user's may not allow to repeat a step
            check.journal.end(STEP, uncompared=f"it cannot be repeated: {typed_message(error).splitlines()[0]}")
        finally:
            self._restore(end)

    def run(self, chosen: Collection[str]) -> dict[str, np.ndarray]:
        """Repeat the step.

        Args:
            chosen: names of the operators that run on the device.

        Returns:
            The losses under ``loss``, and the gradients by parameter.
        """
        self._restore(self._start)
        dropouts, training = self._runner.train_loop.dropouts, self._runner.optim_wrapper
        scale: Any = (lambda loss: loss) if training.scaler is None else training.scaler.scale
        optimizer = BackwardOnly(
            partial(training.backend.autocast, training.precision),
            training.during_backward,
            lambda loss, **kwargs: scale(loss).backward(**kwargs),
        )
        if dropouts is not None:
            dropouts.begin(self._runner.iter, 0)
        try:
            with dispatch_mode(partial(self._call, chosen)):
                self._runner.model.train_step(map_tensors(torch.clone, self._batch), optim_wrapper=optimizer)
        finally:
            if dropouts is not None:
                dropouts.end()
        values = {"loss": np.array([float(loss) for loss in optimizer.losses])}
        gradients = ((name, parameter.grad) for name, parameter in self._model.named_parameters())
        values.update((name, grad.float().cpu().numpy()) for name, grad in gradients if grad is not None)
        return values

    def _call(self, chosen: Collection[str], func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        check = self._check
        if not check.concerns(func, args, kwargs):
            return func(*args, **kwargs)
        name = name_of(func)
        self._names[name] = None
        # Random numbers are drawn on the CPU, where they are the same each time.
        only_on_device = check.uncompared.get(name, "random") != "random" or kwargs.get("generator") is not None
        if only_on_device or name in chosen:
            return func(*args, **kwargs)
        return check.run_on_cpu(func, args, kwargs)

    def _state(self) -> tuple[dict[str, torch.Tensor], Any]:
        """Copies of parameters and buffers on the CPU, and the states of the random generators."""
        tensors = {name: tensor.detach().cpu().clone() for name, tensor in self._tensors()}
        return tensors, rng_state(self._check.backend)

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._model.named_parameters()
        yield from self._model.named_buffers()

    def _restore(self, state: tuple[dict[str, torch.Tensor], Any]) -> None:
        values, generators = state
        with torch.no_grad():
            for name, tensor in self._tensors():
                if not torch.equal(tensor.cpu(), values[name]):
                    tensor.copy_(values[name])
        for parameter in self._model.parameters():
            parameter.grad = None
        set_rng_state(generators, self._check.backend)


def _is_wrong(values: dict[str, np.ndarray], expected: dict[str, np.ndarray], allowed: dict[str, float]) -> bool:
    """Whether losses or gradients differ more than rounding explains."""
    floor = _FLOOR * max((max_abs(value) for name, value in expected.items() if name != "loss"), default=0.0)
    for name, value in expected.items():
        if name not in values or values[name].shape != value.shape:
            return True
        least, limit = (0.0, allowed["loss"]) if name == "loss" else (floor, allowed["gradient"])
        if max_difference(values[name], value, least)[1] > limit:
            return True
    return False


def find_guilty(
    names: Sequence[str], suspects: Collection[str], is_wrong: Callable[[Sequence[str]], bool]
) -> list[list[str]]:
    """The smallest sets of operators that are wrong, none in two sets: single ones first, then those wrong together.

    Args:
        names: of all operators.
        suspects: operators that are likely guilty, in this order; they make the search faster.
        is_wrong: whether a step is wrong if these operators run on the device, and all others on the CPU.
    """
    guilty = [[name] for name in suspects if name in names and is_wrong([name])]
    rest = [name for name in names if [name] not in guilty]
    while rest and is_wrong(rest):
        likely = [name for name in rest if name in suspects]
        if not likely or not is_wrong(likely):
            others = [name for name in rest if name not in likely]
            likely += minimize(others, lambda chosen: is_wrong([*likely, *chosen]))  # noqa: B023 - called at once
        guilty.append(minimize(likely, is_wrong))
        rest = [name for name in rest if name not in guilty[-1]]
    return guilty


def minimize(names: Sequence[str], is_wrong: Callable[[Sequence[str]], bool]) -> list[str]:
    """Delta debugging: a part of ``names`` that is wrong, and no longer so without any one of its members.

    The algorithm ``ddmin`` of Zeller and Hildebrandt, "Simplifying and isolating failure-inducing input", 2002.

    Args:
        names: a wrong set.
        is_wrong: whether a set is wrong.
    """
    names, parts = list(names), 2
    while len(names) > 1:
        size = -(-len(names) // parts)
        subsets = [names[start : start + size] for start in range(0, len(names), size)]
        complements = [[name for name in names if name not in subset] for subset in subsets]
        smaller = next(filter(is_wrong, subsets), None)
        if smaller is not None:
            names, parts = smaller, 2
            continue
        smaller = next(filter(is_wrong, complements if len(subsets) > 2 else ()), None)
        if smaller is not None:
            names, parts = smaller, max(parts - 1, 2)
        elif parts >= len(names):
            break
        else:
            parts = min(2 * parts, len(names))
    return names


def name_of(func: Any) -> str:
    """Name of an operator, such as ``aten.gelu_backward.default``; without the overload on torch < 1.12."""
    text = str(func)
    return text if text.startswith("aten.") or "." in text.split(" ")[0] else f"aten.{func.__name__}"


def _base_name(func: Any) -> str:
    return name_of(func).split(".")[1]


def _computes_nothing(func: Any) -> bool:
    """Whether an operator computes nothing: it allocates uninitialized memory, or returns a view."""
    if _base_name(func).startswith(_UNINITIALIZED):
        return True
    schema = getattr(func, "_schema", None)
    returns = () if schema is None else schema.returns
    return any(value.alias_info is not None and not value.alias_info.is_write for value in returns)


def _is_mutable(func: Any) -> bool:
    mutable = getattr(getattr(func, "_schema", None), "is_mutable", None)
    return _base_name(func).endswith(("_", "out")) if mutable is None else bool(mutable)


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any], reference: Any) -> dict[int, Any]:
    """Tensors that an operator writes: pairs of the copy in ``reference`` and the tensor, by ``id`` of the copy."""
    if not _is_mutable(func):
        return {}
    arguments = getattr(getattr(func, "_schema", None), "arguments", None)
    if arguments is None:  # old torch: the first argument, or ``out``
        names = {0, "out"}
    else:
        infos = [(index, argument.name, argument.alias_info) for index, argument in enumerate(arguments)]
        names = {key for index, name, info in infos if info is not None and info.is_write for key in (index, name)}
    values: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
    copies: dict[Any, Any] = {**dict(enumerate(reference[0])), **reference[1]}
    pairs = (pair for key in values if key in names for pair in zip(tensors_of(copies[key]), tensors_of(values[key])))
    return {id(copy): (copy, tensor) for copy, tensor in pairs}


def _requested(result: Any, args: Sequence[Any]) -> Any:
    """The result without gradients that the operator's ``output_mask`` excludes: their memory is uninitialized."""
    for argument in args if isinstance(result, tuple) else ():
        is_sequence = isinstance(argument, (list, tuple)) and len(argument) == len(result)
        if is_sequence and all(isinstance(flag, bool) for flag in argument):
            return [value for value, requested in zip(result, argument) if requested]
    return (result,)


def _copied_to_cpu(value: Any, mutable: bool) -> Any:
    """Arguments of an operator with all tensors copied to the CPU, and ``device`` set to the CPU.

    A tensor that occurs twice is copied once. If the operator writes nothing, 0-dim CPU tensors are not copied: torch
    makes such tensors from Python numbers, and a copy would take part in type promotion like an ordinary tensor.
    """
    copies: dict[int, torch.Tensor] = {}

    def move(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() == 0 and tensor.device.type == "cpu" and not mutable:
            return tensor
        if id(tensor) not in copies:
            detached = tensor.detach()
            copies[id(tensor)] = detached.clone() if tensor.device.type == "cpu" else detached.cpu()
        return copies[id(tensor)]

    args, kwargs = map_tensors(move, value)
    return args, {key: torch.device("cpu") if key == "device" and argument is not None else argument
                  for key, argument in kwargs.items()}  # fmt: skip


def difference(on_device: Any, on_cpu: Any, floor: float) -> dict[str, Any]:
    """The largest difference between the tensors of two structures.

    Args:
        on_device: tensors of the device, also nested in dicts, lists and tuples.
        on_cpu: tensors of the CPU, in the same order.
        floor: lower bound of the scale of a relative difference.

    Returns:
        ``relative``, the difference divided by the largest absolute value of the CPU's tensor, and ``dtype`` of the
        tensor with the largest difference. Integers and booleans differ by 0 or 1. Infinite if shapes or dtypes differ,
        or only one value is finite; if the numbers of tensors differ, ``dtype`` is None.
    """
    tested, reference = list(tensors_of(on_device)), list(tensors_of(on_cpu))
    if len(tested) != len(reference):
        return {"relative": math.inf, "dtype": None}
    differences = [(_difference_of(a.detach(), b.detach(), floor), str(b.dtype)[6:]) for a, b in zip(tested, reference)]
    relative, dtype = max(differences, default=(0.0, None))
    return {"relative": relative, "dtype": dtype}


def _difference_of(a: torch.Tensor, b: torch.Tensor, floor: float) -> float:
    if a.shape != b.shape or a.dtype != b.dtype:
        return math.inf
    if not b.is_floating_point():
        return float((a.cpu() != b).any())
    return max_difference(a.cpu().double().numpy(), b.double().numpy(), floor)[1]
