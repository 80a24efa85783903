"""task=operators: compares every operator of a training step, forward and backward, with the CPU.

The experiment trains a few steps on the device, and every operator that torch dispatches is intercepted, also those
with portable kernels. Each operator runs first on the CPU, on copies of its inputs, then on the device, and the results
are compared. If the device raises an error, the training continues with the CPU's result, so that one defect does not
hide the next.
"""

from __future__ import annotations

import contextlib
import math
from functools import partial
from typing import TYPE_CHECKING, Any, Callable, Container, Sequence

import torch
from mmengine.hooks import Hook

from exp.checks.check import LIMITS_S, Journal
from exp.checks.measure import train_with
from exp.checks.parity import max_abs, max_difference
from exp.data.loader import map_tensors, tensors_of
from exp.engine.result import make_result
from exp.errors import first_line, typed_line
from exp.hardware.compat import dispatch_mode

if TYPE_CHECKING:
    from exp.hardware.backend import Backend
    from exp.session import Session


_MAX_SIGNATURES = 8
"""Number of signatures (shapes, dtypes, devices) per operator that are compared; calls with others just run."""
_FLOOR = 1e-3
"""Lower bound of the scale of a relative difference, as a share of the largest input: a sum that cancels to zero has no
scale of its own."""
_UNINITIALIZED = ("empty", "new_empty", "resize_", "set_", "_pin_memory", "is_pinned")


def check_operators(session: Session) -> dict[str, Any]:
    """Train ``max_steps`` steps and compare every operator; writes the results to ``operators.jsonl``.

    Returns:
        The content of ``result.json``.
    """
    journal = Journal(session.folder.path / "operators.jsonl", LIMITS_S["operators"])
    check = OperatorCheck(session.backend, session.device, journal, session.kernels.portable)
    return make_result(session, {}, None, steps=train_with(session, check))


class OperatorCheck(Hook):
    """Runs operators on the device and on the CPU, and records the differences of their results.

    As a hook it does so during each training step and validation batch only: between them, data loaders draw random
    numbers in a way that old torch versions cannot intercept.

    Args:
        backend: backend of the device.
        device: device under test; calls without tensors of this device just run.
        journal: receives one line per operator and signature. Operators that crashed in an earlier attempt run only on
            the CPU.
        portable: ATen names of operators with a portable kernel (:mod:`exp.hardware.operators`).

    Attributes:
        seen: by name of the operator, the signatures that were compared.
        on_cpu: names of operators that only run on the CPU, because the device cannot run them.
    """

    priority = "VERY_LOW"

    def __init__(self, backend: Backend, device: torch.device, journal: Journal, portable: Container[str] = ()) -> None:
        self.backend, self.device, self.journal, self._portable = backend, device, journal, portable
        self.seen: dict[str, set[Any]] = {}
        self.on_cpu = set(journal.crashed)
        self._window = contextlib.ExitStack()

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        """Intercept operators."""
        self._window.close()
        self._window.enter_context(dispatch_mode(self))

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Intercept no more."""
        self._window.close()

    before_val_iter, after_val_iter = before_train_iter, after_train_iter

    def __call__(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run one call of an operator, and compare it if its signature is new; returns its result."""
        if not self._concerns(func, args, kwargs):
            return func(*args, **kwargs)
        name = name_of(func)
        if name in self.on_cpu:
            reference: Any = _copied_to_cpu((args, kwargs), _is_mutable(func))
            return self._on_device(func, args, kwargs, reference, func(*reference[0], **reference[1]))
        seen, tensors = self.seen.setdefault(name, set()), tensors_of((args, kwargs))
        signature = tuple((tuple(tensor.shape), str(tensor.dtype), tensor.device.type) for tensor in tensors)
        if signature in seen or len(seen) >= _MAX_SIGNATURES:
            return func(*args, **kwargs)
        seen.add(signature)
        detail = ", ".join(f"{str(dtype)[6:]}{list(shape)}" for shape, dtype, _ in signature[:6])
        description: dict[str, Any] = {"detail": detail, "portable": _base_name(func) in self._portable}
        self.journal.begin(name, **description)
        return self._compare(name, partial(self.journal.end, name, **description), func, args, kwargs)

    def _concerns(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Whether a call computes something on the device under test."""
        devices = {tensor.device.type for tensor in tensors_of((args, kwargs))}
        devices.update(torch.device(device).type for device in [kwargs.get("device")] if device is not None)
        return self.device.type in devices and not _computes_nothing(func)

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
            record(left=fallbacks, uncompared=reason)
            return result
        on_device, on_cpu = _requested(result, args), _requested(expected, args)
        if _is_mutable(func):
            on_device, on_cpu = (result, args, kwargs), (expected, *reference)
        record(left=fallbacks, **difference(on_device, on_cpu, _FLOOR * scale))
        return result

    def _on_device(self, func: Any, args: Any, kwargs: Any, reference: Any, expected: Any) -> Any:
        """The CPU's result where the operator's would be: on its device, or in the arguments that it writes."""
        target = kwargs.get("device") or self.device
        written = _written(func, args, kwargs, reference)
        for copy, tensor in written.values():
            tensor.copy_(copy)
        return map_tensors(lambda value: written[id(value)][1] if id(value) in written else value.to(target), expected)


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
