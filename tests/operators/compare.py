"""Run in a process of its own: torch's own samples by torch's own kernels, then by the portable ones, on the CPU.

Prints what differs, and how often each portable kernel ran.
"""

from __future__ import annotations

import itertools
import json
import sys
import warnings
from collections import Counter
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


def drawn(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=dtype)


def further() -> Iterator[Case]:
    """What no sample of torch's reaches."""
    maps = {axes: drawn(2, 3, 6, 5, 7)[(..., *[2] * (3 - axes))].contiguous() for axes in (1, 2, 3)}
    cases: dict[str, tuple[Callable[..., Any], list[Any]]] = {
        "weight norm": (lambda v, g: torch._weight_norm(v, g, 0), [drawn(4, 3, 2), drawn(4, 1, 1)]),
        "weight norm of the last axis": (lambda v, g: torch._weight_norm(v, g, 2), [drawn(4, 3, 2), drawn(1, 1, 2)]),
    }
    for mode in ("bilinear", "bicubic"):
        cases[f"{mode}, filtered"] = (
            lambda x, mode=mode: F.interpolate(x, (4, 10), mode=mode, antialias=True),
            [maps[2]],
        )
    for axes in (1, 2, 3):
        size = (3, 9, 4)[:axes]
        for mode in ("nearest", "nearest-exact"):
            cases[f"{mode} {axes}"] = (lambda x, size=size, mode=mode: F.interpolate(x, size, mode=mode), [maps[axes]])
        for mode in ("replicate", "reflect"):
            padding = (1, 2, 2, 1, 1, 0)[: 2 * axes]
            cases[f"{mode} {axes}"] = (lambda x, pads=padding, mode=mode: F.pad(x, pads, mode), [maps[axes]])
    for name, (function, inputs) in cases.items():
        yield Case(name, function, [value.requires_grad_() for value in inputs])


def weighted(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Weights that differ, of the shapes of these."""
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(each.shape, generator=generator, dtype=torch.float64).to(each.dtype) for each in tensors]


def numbers(case: Case) -> dict[str, list[torch.Tensor]] | None:
    """Result, first and second derivatives; None: torch cannot compute the result itself."""
    torch.manual_seed(0)
    # What is not differentiated by may be written to, such as running means.
    inputs = [
        each if not isinstance(each, torch.Tensor) or each.requires_grad else each.clone() for each in case.inputs
    ]
    by = [each for each in inputs if isinstance(each, torch.Tensor) and each.requires_grad]
    found: dict[str, list[torch.Tensor]] = {}
    try:
        results = [each for each in tree_flatten(case.function(*inputs))[0] if isinstance(each, torch.Tensor)]
        found["result"] = [each.detach() for each in results]
        for order in ("first", "second"):
            results = [each for each in results if each.requires_grad and each.numel()]
            if not results or not by:
                break
            arguments = (results, by, weighted(results))
            if order == "first":  # some formulas are others where they are differentiated again
                found["plain"] = present(torch.autograd.grad(*arguments, retain_graph=True, allow_unused=True))
            results = present(torch.autograd.grad(*arguments, create_graph=True, allow_unused=True))
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
            if (a.shape, a.dtype) != (b.shape, b.dtype):
                yield f"{order}: {a.dtype} {list(a.shape)} and not {b.dtype} {list(b.shape)}"
            elif not close(a, b):
                yield f"{order}: off by {float((a.to(torch.complex128) - b).abs().max()):.3g}"


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    if not b.is_floating_point() and not b.is_complex():
        return bool(torch.equal(a, b))
    finite = torch.isfinite(b)
    scale = max(1.0, float(b[finite].abs().max())) if finite.any() else 1.0
    return torch.allclose(a, b, rtol=0.0, atol=LARGEST.get(b.dtype, 1e-12) * scale, equal_nan=True)


class Reached(TorchDispatchMode):
    """Notes which operators were called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(function._schema.name.partition("::")[2])
        return function(*args, **(kwargs or {}))


def counted(kernels: dict[str, Callable[..., Any]], calls: Counter[str]) -> None:
    def counting(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return kernel(*args, **kwargs)

        return run

    for name, kernel in list(kernels.items()):
        kernels[name] = counting(name, kernel)


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    from exp import operators
    from exp.operators import separable

    kernels = set(operators.KERNELS) - separable.TELLING
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
    for case in further():
        native.append((case, numbers(case)))
    calls: Counter[str] = Counter()
    counted(operators.KERNELS, calls)
    operators.install("cpu", kernels)
    wrong = {}
    for case, theirs in native:
        found = list(differences(numbers(case), theirs))
        if found:
            wrong[case.name] = found
    json.dump(
        {"cases": len(native), "wrong": wrong, "kernels": calls, "never": sorted(kernels - set(calls))}, sys.stdout
    )


if __name__ == "__main__":
    main()
