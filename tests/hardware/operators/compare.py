"""Run in a process of its own: torch's own samples by torch's own kernels, then by the portable ones, on the CPU.

Prints what differs, and which portable kernels never ran.
"""

from __future__ import annotations

import itertools
import json
import sys
import warnings
from functools import partial
from typing import Any, Callable, Iterable, Iterator, NamedTuple

import torch
import torch.nn.functional as F
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

# Of the largest number: rounding of the type itself, twice where the two add up in another order.
LARGEST = {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}


FIRST = 8
ELSEWHERE = ("fft.", "jiterator", "linalg.", "masked.", "ops.", "signal.", "sparse.", "special.")
"""Operators of torch that are composed of others, or not of a device; what they call has samples of its own."""
ROUNDED = ("nn.functional.hardsigmoid",)
"""Those that torch computes with a number in float32, whatever the type."""


class Case(NamedTuple):
    name: str
    function: Callable[..., Any]
    inputs: list[Any]
    """Arguments of the function; those that require a gradient are differentiated by, twice where torch can."""


def samples(operator: Any, dtype: torch.dtype) -> Iterator[Case]:
    differentiable = operator.supports_autograd and dtype.is_floating_point
    for number, sample in enumerate(operator.sample_inputs("cpu", dtype, requires_grad=differentiable)):
        for kind in ("", " non-contiguous"):
            given = sample.noncontiguous() if kind else sample
            leaves, structure = tree_flatten((given.input, given.args, given.kwargs))

            def function(*values: Any, structure: Any = structure) -> Any:
                first, rest, named = structure.unflatten(list(values))
                return operator(first, *rest, **named)

            yield Case(f"{operator.formatted_name} {dtype} {number}{kind}", function, leaves)


def drawn(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def further() -> Iterator[Case]:
    """What no sample of torch's reaches."""
    found: dict[str, tuple[Callable[..., Any], list[torch.Tensor]]] = {
        "weight norm": (partial(torch._weight_norm, dim=0), [drawn(4, 3, 2), drawn(4, 1, 1)]),
        "weight norm of the last axis": (partial(torch._weight_norm, dim=2), [drawn(4, 3, 2), drawn(1, 1, 2)]),
    }
    for axes in (1, 2, 3):
        x = drawn(2, 3, 6, 5, 7)[(..., *[2] * (3 - axes))].contiguous()
        for mode in ("nearest", "nearest-exact"):
            found[f"{mode} {axes}"] = (partial(F.interpolate, size=(3, 9, 4)[:axes], mode=mode), [x])
        for mode in ("replicate", "reflect"):
            found[f"{mode} {axes}"] = (partial(F.pad, pad=(1, 2, 2, 1, 1, 0)[: 2 * axes], mode=mode), [x])
        for mode in ("bilinear", "bicubic") if axes == 2 else ():
            found[f"{mode}, filtered"] = (partial(F.interpolate, size=(4, 10), mode=mode, antialias=True), [x])
    for name, (function, inputs) in found.items():
        yield Case(name, function, [each.clone().requires_grad_() for each in inputs])


def numbers(case: Case) -> dict[str, list[torch.Tensor]] | None:
    """Result, first and second derivatives; None: torch cannot compute the result itself."""
    torch.manual_seed(0)
    # What is not differentiated by may be written to, such as running means.
    inputs = [each.clone() if isinstance(each, torch.Tensor) and not each.requires_grad else each
              for each in case.inputs]  # fmt: skip
    by = [each for each in inputs if isinstance(each, torch.Tensor) and each.requires_grad]
    found: dict[str, list[torch.Tensor]] = {}
    try:
        results = [each for each in tree_flatten(case.function(*inputs))[0] if isinstance(each, torch.Tensor)]
        found["result"] = [each.detach() for each in results]
        for order in ("first", "second"):
            results = [each for each in results if each.requires_grad and each.numel()]
            if not results or not by:
                break
            weights = [drawn(*each.shape, seed=2 + place).to(each.dtype) for place, each in enumerate(results)]
            derive = partial(torch.autograd.grad, results, by, weights, allow_unused=True)
            if order == "first":  # some formulas are others where they are differentiated again
                found["plain"] = present(derive(retain_graph=True))
            results = present(derive(create_graph=True))
            found[order] = [each.detach() for each in results]
    except (AssertionError, NotImplementedError, RuntimeError):  # not computed, or not differentiable any further
        pass
    return found or None


def present(tensors: Iterable[torch.Tensor | None]) -> list[torch.Tensor]:
    return [each for each in tensors if each is not None]


def differences(ours: dict[str, list[torch.Tensor]] | None, theirs: dict[str, list[torch.Tensor]]) -> Iterator[str]:
    if ours is None or ours.keys() != theirs.keys():
        yield f"has {list(ours or [])} and not {list(theirs)}"
        return
    for order, expected in theirs.items():
        for a, b in zip(ours[order], expected):
            off = 0.0
            if b.is_floating_point() or b.is_complex():
                finite = b[torch.isfinite(b)].abs()
                off = LARGEST.get(b.dtype, 1e-12) * max(1.0, float(finite.max()) if len(finite) else 1.0)
            try:
                torch.testing.assert_close(a, b, rtol=0.0, atol=off, equal_nan=True)
            except AssertionError as error:
                yield f"{order}: {error}"


class Reached(TorchDispatchMode):
    """Notes which operators were called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(function._schema.name.partition("::")[2])
        return function(*args, **(kwargs or {}))


def counting(name: str, kernel: Callable[..., Any], calls: set[str]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        calls.add(name)
        return kernel(*args, **kwargs)

    return run


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    from exp.hardware import operators
    from exp.hardware.operators import separable

    kernels = set(operators.KERNELS) - separable.SELF_REFERENTIAL
    native = []
    for operator in op_db:
        precise = torch.float32 if operator.name in ROUNDED else torch.float64
        for dtype, most in ((precise, 80), (torch.bfloat16, 6), (torch.float16, 6)):
            if operator.name.startswith(ELSEWHERE) or dtype not in operator.supported_dtypes("cpu"):
                continue
            before = len(native)
            for number, case in enumerate(itertools.islice(samples(operator, dtype), most)):
                if number == FIRST and len(native) == before:
                    break  # none of its samples will
                with Reached() as reached:
                    found = numbers(case)
                if found is not None and reached.names & kernels:
                    native.append((case, found))
            if len(native) == before:
                break
    native += [(case, numbers(case)) for case in further()]
    calls: set[str] = set()
    operators.KERNELS.update({name: counting(name, kernel, calls) for name, kernel in operators.KERNELS.items()})
    kept = operators.PortableKernels("cpu", kernels)
    wrong = {case.name: list(differences(numbers(case), theirs)) for case, theirs in native}
    assert kept.names <= kernels
    found = {
        "cases": len(native),
        "wrong": {name: each for name, each in wrong.items() if each},
        "never": sorted(kernels - calls),
    }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
