"""Messages of a hidden Markov model in the log domain, by a loop over time or by an associative scan.

Both forms are exact and give the same messages. Tensors have time first and the batch last, (T, K, B), so that every
reduction over regimes runs along contiguous batches.
"""

from __future__ import annotations

from typing import Callable

import torch

__all__ = ["CPU_SCAN_WORK", "DEVICE_SCAN_ELEMENTS", "FORMS", "backtrace", "best_messages", "choose_form",
           "probability_messages"]  # fmt: skip

FORMS = ("auto", "loop", "scan")

CPU_SCAN_WORK = 8192
"""On the CPU the scan is taken up to this B * K**3.

Log-likelihood and gradients, 1440 steps, ms on 1 thread (and 2) of a server CPU, torch 2.13:

====  ====  ========  =========
B     K     loop      scan
====  ====  ========  =========
16    4     40 (39)   10 (7)
16    6     36 (40)   18 (13)
16    8     40 (44)   40 (21)
64    4     42 (44)   32 (20)
64    6     55 (54)   98 (58)
16    16    71 (70)   some 400
====  ====  ========  =========
"""

DEVICE_SCAN_ELEMENTS = 2**27
"""On accelerators the scan is taken up to this T * B * K**3: its widest step holds half as many numbers, 256 MiB.

Not measured but counted: the loop launches some ten small kernels per step one after the other, the scan some fifty
per level of its tree.
"""

_Reduce = Callable[[torch.Tensor, int], torch.Tensor]


def choose_form(form: str, steps: int, regimes: int, batch: int, device_type: str) -> str:
    """``"loop"`` or ``"scan"``: ``form`` itself, or for ``"auto"`` the faster one by the documented constants.

    Raises:
        ValueError: ``form`` is unknown.
    """
    if form not in FORMS:
        raise ValueError(f"form={form!r} of a hidden Markov model is not known; use one of {', '.join(FORMS)}")
    if steps < 3:
        return "loop"  # there is nothing to scan over
    if form != "auto":
        return form
    work = batch * regimes**3
    fits = work <= CPU_SCAN_WORK if device_type == "cpu" else steps * work <= DEVICE_SCAN_ELEMENTS
    return "scan" if fits else "loop"


def probability_messages(
    emissions: torch.Tensor, initial: torch.Tensor, transition: torch.Tensor, form: str, with_future: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The forward and backward messages (Rabiner, Proc. IEEE 77(2), 1989, eqs. 19-25), normalised at every step.

    Args:
        emissions: (T, K, B), log p(x_t | regime); finite, and 0 at most.
        initial: (K,), log p(first regime); finite.
        transition: (K, K), log p(to | from) at [from, to]; finite.
        form: ``"loop"`` or ``"scan"``.
        with_future: whether the backward messages are wanted too.

    Returns:
        ``predicted`` (T, K, B), log p(regime_t | x_<t); ``future`` (T, K, B), log p(x_>t | regime_t) up to a constant
        for each step, or None.
    """
    return _messages(emissions, initial, transition, form, with_future, _log_sum_exp, _log_normalised)


def best_messages(emissions: torch.Tensor, initial: torch.Tensor, transition: torch.Tensor, form: str) -> torch.Tensor:
    """Like :func:`probability_messages`, with maxima for sums: the score of the best way into each regime.

    Returns:
        (T, K, B), before the step's emission, up to a constant for each step.
    """
    best, _ = _messages(emissions, initial, transition, form, False, _maximum, _below_zero)
    return best


def backtrace(pointers: torch.Tensor, last: torch.Tensor, form: str) -> torch.Tensor:
    """Follow pointers from the last step to the first.

    Args:
        pointers: (T - 1, K, B), int64: the regime at step t from which the regime at step t + 1 is best reached.
        last: (B,), int64, the regime at the last step.
        form: ``"loop"`` or ``"scan"``.

    Returns:
        (T, B), int64.
    """
    if form == "loop":
        path = [last.unsqueeze(0)]
        for step in reversed(pointers.unbind(0)):
            path.append(step.gather(0, path[-1]))
        return torch.cat(path[::-1])
    # A segment of time is a map from the regime after it to the regime before it: composition is associative.
    levels, _ = _tree(pointers.transpose(0, 1), lambda left, right: left.gather(0, right), dim=1)
    after = last.view(1, 1, -1)
    for left, right, count in reversed(levels):
        paired = after[:, : left.shape[1]]
        after = _interleave(right.gather(0, paired), paired, after, count)
    before = pointers.gather(1, after.transpose(0, 1)).squeeze(1)
    return torch.cat([before, last.unsqueeze(0)])


def _messages(
    emissions: torch.Tensor,
    initial: torch.Tensor,
    transition: torch.Tensor,
    form: str,
    with_future: bool,
    reduce: _Reduce,
    normalise: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    start = initial.view(-1, 1).expand(emissions.shape[1:])
    matrix = transition[:, :, None, None]
    if form == "scan":
        before, after = _scan(emissions, start, matrix, with_future, reduce)
        # One step from the boundaries, as in the loop: constants that the scan has dropped come back.
        known = normalise(before + emissions[:-1].transpose(0, 1))
        predicted = torch.cat([start.unsqueeze(1), reduce(known.unsqueeze(1) + matrix, 0)], 1).transpose(0, 1)
        if after is None:
            return predicted, None
        future = reduce(normalise(after).unsqueeze(0) + matrix, 1)
        return predicted, torch.cat([future, torch.zeros_like(start).unsqueeze(1)], 1).transpose(0, 1)
    # Backward messages are forward messages of the reversed sequence under the transposed transition: both in one loop.
    message, steps = start.unsqueeze(1), emissions.unsqueeze(2)
    if with_future:
        message = torch.stack([start, torch.zeros_like(start)], 1)
        steps = torch.stack([emissions, emissions.flip(0)], 2)
        matrix = torch.cat([matrix, matrix.transpose(0, 1)], 2)
    messages = [message]
    for step in steps.unbind(0)[:-1]:
        message = reduce(normalise(message + step).unsqueeze(1) + matrix, 0)
        messages.append(message)
    stacked = torch.stack(messages)
    return stacked[:, :, 0], stacked[:, :, 1].flip(0) if with_future else None


def _scan(
    emissions: torch.Tensor, start: torch.Tensor, matrix: torch.Tensor, with_future: bool, reduce: _Reduce
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Associative scan over time: up a tree with products of K x K matrices, down with vectors only.

    Blelloch, "Prefix sums and their applications", 1990; for hidden Markov models Hassan, Sarkka and Garcia-Fernandez,
    arXiv 2102.05743.

    Returns:
        (K, T - 1, B) each, up to constants: the forward message before step t's emission, and the backward message
        after step t with the emission of step t + 1.
    """

    def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        joined = reduce(left.unsqueeze(2) + right.unsqueeze(0), 1)
        return joined - joined.amax((0, 1), keepdim=True)

    levels, _ = _tree(emissions[:-1].transpose(0, 1).unsqueeze(1) + matrix, product, dim=2)
    before = start.unsqueeze(1)
    after = emissions[-1].unsqueeze(1) if with_future else None
    for left, right, count in reversed(levels):
        pairs = left.shape[2]
        message = before[:, :pairs]
        before = _interleave(message, _below_zero(reduce(message.unsqueeze(1) + left, 0)), before, count)
        if after is not None:
            message = after[:, :pairs]
            after = _interleave(_below_zero(reduce(message.unsqueeze(0) + right, 1)), message, after, count)
    return before, after


def _tree(
    leaves: torch.Tensor, combine: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], dim: int
) -> tuple[list[tuple[torch.Tensor, torch.Tensor, int]], torch.Tensor]:
    """Combine neighbours along ``dim`` until one is left; an odd one at the end goes up as it is.

    Returns:
        From the leaves upwards: left and right partners and how many there were in all; and what is left.
    """
    levels = []
    count = leaves.shape[dim]
    while count > 1:
        pairs = leaves.narrow(dim, 0, count // 2 * 2).unflatten(dim, (count // 2, 2))
        left, right = (partner.contiguous() for partner in pairs.unbind(dim + 1))
        levels.append((left, right, count))
        odd = leaves.narrow(dim, count - count % 2, count % 2)
        leaves = torch.cat([combine(left, right), odd], dim)
        count = leaves.shape[dim]
    return levels, leaves


def _interleave(even: torch.Tensor, odd: torch.Tensor, parents: torch.Tensor, count: int) -> torch.Tensor:
    """(K, pairs, B) twice -> (K, count, B), where an odd last one is its parent."""
    children = torch.stack([even, odd], 2).flatten(1, 2)
    return torch.cat([children, parents[:, even.shape[1] :]], 1) if count % 2 else children


def _log_sum_exp(x: torch.Tensor, dim: int) -> torch.Tensor:
    # torch.logsumexp with less traffic: x is not read again, so that it takes the exponentials.
    peak = x.amax(dim, keepdim=True)
    return x.sub_(peak).exp_().sum(dim).log_().add_(peak.squeeze(dim))


def _maximum(x: torch.Tensor, dim: int) -> torch.Tensor:
    return x.amax(dim)


def _log_normalised(x: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(x, 0)


def _below_zero(x: torch.Tensor) -> torch.Tensor:
    return x - x.amax(0, keepdim=True)
