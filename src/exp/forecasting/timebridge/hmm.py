"""Hidden Markov model: log-likelihood, posterior and most probable path of a batch of sequences.

All three take log p(x_t | regime) of every step, the log-probabilities of the first regime and those of the
transitions, and work in float32 and the log domain with messages normalised at every step, so that neither long
sequences nor improbable observations under- or overflow.

Two forms give the same result: a loop over time, T dependent steps of K**2 work, and an associative scan, log2(T)
dependent steps of K**3 work. ``form="auto"`` takes the faster one; ``"loop"`` and ``"scan"`` force one (the measured
table: :data:`exp.forecasting.timebridge.messages.CPU_SCAN_WORK`).

Log-probabilities below ``LOG_FLOOR``, -inf among them, count as ``LOG_FLOOR``: a transition of probability zero is
never taken where there is another way, its expected count and so its gradient are 0, and a sequence that is impossible
has a log-likelihood of about ``LOG_FLOOR`` rather than -inf, and finite gradients.

Rounding: messages are exact to float32's 6e-8 of the log-ratios between the regimes of a step. In the scan these are
ratios between the regimes of a whole stretch of time: where regimes do not communicate (transitions of probability
zero) they grow with its length, and the loop keeps more digits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from exp.forecasting.timebridge.messages import backtrace, best_messages, choose_form, probability_messages
from exp.hardware.compat import autocast_disabled

__all__ = ["LOG_FLOOR", "log_likelihood", "posterior", "viterbi"]

LOG_FLOOR = -1e30
"""Least log-probability: far below any of a real observation, and some 1e8 of them add up without overflow."""


def log_likelihood(
    log_emissions: torch.Tensor, log_initial: torch.Tensor, log_transition: torch.Tensor, form: str = "auto"
) -> torch.Tensor:
    """Log-likelihood log p(x_1 ... x_T) by the forward algorithm (Rabiner, Proc. IEEE 77(2), 1989, sec. III A).

    Its gradients are the posteriors for the emissions and the expected counts for the transitions (Fisher's identity),
    from backward messages that the forward pass computes along with the forward ones. Differentiable once.

    Args:
        log_emissions: (B, T, K), log p(x_t | regime); may have any magnitude, for densities also above 0.
        log_initial: (K,), log p(first regime).
        log_transition: (K, K), log p(to | from) at [from, to]; a row's probabilities add up to 1, which is not checked.
        form: ``"auto"``, ``"loop"`` or ``"scan"``.

    Returns:
        (B,), float32. The backward pass holds B T K**2 numbers for a moment if ``log_transition`` needs a gradient.

    Raises:
        ValueError: a shape does not go with the others, or ``form`` is unknown.
    """
    _check(log_emissions, log_initial, log_transition)
    inputs = (log_emissions, log_initial, log_transition)
    # Asked here, since within a Function gradients are always off.
    with_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
    with autocast_disabled(log_emissions.device.type):
        result: torch.Tensor = _LogLikelihood.apply(*(tensor.float() for tensor in inputs), form, with_gradient)
    return result


@torch.no_grad()
def posterior(
    log_emissions: torch.Tensor, log_initial: torch.Tensor, log_transition: torch.Tensor, form: str = "auto"
) -> torch.Tensor:
    """Smoothed marginals p(regime_t | x_1 ... x_T) by the forward-backward algorithm; no gradients flow through them.

    Args:
        log_emissions: (B, T, K).
        log_initial: (K,).
        log_transition: (K, K).
        form: ``"auto"``, ``"loop"`` or ``"scan"``.

    Returns:
        (B, T, K), float32; 1 in sum over the regimes of a step.

    Raises:
        ValueError: a shape does not go with the others, or ``form`` is unknown.
    """
    _check(log_emissions, log_initial, log_transition)
    with autocast_disabled(log_emissions.device.type):
        model = _Steps(log_emissions.float(), log_initial.float(), log_transition.float(), form)
        predicted, future = probability_messages(*model.inputs, model.form, with_future=True)
        assert future is not None
        return torch.softmax(predicted + model.emissions + future, 1).permute(2, 0, 1).contiguous()


@torch.no_grad()
def viterbi(
    log_emissions: torch.Tensor, log_initial: torch.Tensor, log_transition: torch.Tensor, form: str = "auto"
) -> torch.Tensor:
    """The most probable path (Viterbi 1967; Rabiner, Proc. IEEE 77(2), 1989, sec. III B).

    Of equally probable ways the one from the lowest regime is taken, from the last step backwards. What is equal is
    decided in float32: of paths whose probabilities differ by no more than rounding either may be returned.

    Args:
        log_emissions: (B, T, K).
        log_initial: (K,).
        log_transition: (K, K).
        form: ``"auto"``, ``"loop"`` or ``"scan"``.

    Returns:
        (B, T), int64.

    Raises:
        ValueError: a shape does not go with the others, or ``form`` is unknown.
    """
    _check(log_emissions, log_initial, log_transition)
    with autocast_disabled(log_emissions.device.type):
        model = _Steps(log_emissions.float(), log_initial.float(), log_transition.float(), form)
        scores = best_messages(*model.inputs, model.form) + model.emissions
        scores = scores - scores.amax(1, keepdim=True)
        pointers = _best_origins(scores[:-1], model.transition)
        last = _best_origins(scores[-1:], torch.zeros_like(model.transition[:, :1])).flatten()
        return backtrace(pointers, last, model.form).t().contiguous()


class _Steps:
    """What the recursions work on: time first, batch last, floored, each step's most probable emission at 0."""

    def __init__(self, emissions: torch.Tensor, initial: torch.Tensor, transition: torch.Tensor, form: str) -> None:
        batch, steps, regimes = emissions.shape
        self.form = choose_form(form, steps, regimes, batch, emissions.device.type)
        emissions = emissions.clamp_min(LOG_FLOOR).permute(1, 2, 0).contiguous()
        self.peaks = emissions.amax(1)  # (T, B); improbable steps would cost the messages their digits
        self.emissions = (emissions - self.peaks.unsqueeze(1)).clamp_min_(LOG_FLOOR)
        self.initial = initial.clamp_min(LOG_FLOOR)
        self.transition = transition.clamp_min(LOG_FLOOR)
        self.inputs = (self.emissions, self.initial, self.transition)


def _best_origins(scores: torch.Tensor, transition: torch.Tensor) -> torch.Tensor:
    """The lowest i that maximises scores[t, i, b] + transition[i, j] for each t, j and b.

    One regime after the other, since argmax promises the lowest of equals on some devices only, and is slower.

    Args:
        scores: (T, K, B).
        transition: (K, J).

    Returns:
        (T, J, B), int64.
    """
    best = scores[:, :1] + transition[0].unsqueeze(1)
    origins = torch.zeros_like(best, dtype=torch.int64)
    for regime in range(1, scores.shape[1]):
        reached = scores[:, regime : regime + 1] + transition[regime].unsqueeze(1)
        origins.masked_fill_(reached > best, regime)
        best = torch.maximum(best, reached)
    return origins


class _LogLikelihood(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        emissions: torch.Tensor,
        initial: torch.Tensor,
        transition: torch.Tensor,
        form: str,
        with_gradient: bool,
    ) -> torch.Tensor:
        model = _Steps(emissions, initial, transition, form)
        predicted, future = probability_messages(*model.inputs, model.form, with_gradient)
        joint = predicted + model.emissions
        result = (torch.logsumexp(joint, 1) + model.peaks).sum(0)  # log p(x_t | x_<t) of every step
        if future is not None:
            known = torch.log_softmax(joint, 1)
            ctx.save_for_backward(predicted, known, torch.log_softmax(known + future, 1), model.transition)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        predicted, known, log_posterior, transition = ctx.saved_tensors
        emissions_grad = initial_grad = transition_grad = None
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
            weighted = log_posterior.exp() * grad
            emissions_grad, initial_grad = weighted.permute(2, 0, 1), weighted[0].sum(1)
        if ctx.needs_input_grad[2]:
            # p(from, to | x) = p(from | to, x_<=t) p(to | x). In this order large numbers cancel before small ones
            # are added.
            pairs = (known[:-1].unsqueeze(2) + transition[:, :, None]).sub_(predicted[1:].unsqueeze(1))
            pairs = pairs.add_(log_posterior[1:].unsqueeze(1)).exp_()
            transition_grad = pairs.mul_(grad).sum((0, 3))
        return emissions_grad, initial_grad, transition_grad, None, None


def _check(log_emissions: torch.Tensor, log_initial: torch.Tensor, log_transition: torch.Tensor) -> None:
    if log_emissions.dim() != 3 or 0 in log_emissions.shape:
        raise ValueError(
            f"log_emissions of a hidden Markov model has the shape {tuple(log_emissions.shape)}; "
            f"pass (batch, steps, regimes), none of them 0"
        )
    regimes = log_emissions.shape[2]
    for name, tensor, shape in (
        ("log_initial", log_initial, (regimes,)),
        ("log_transition", log_transition, (regimes, regimes)),
    ):
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"{name} of a hidden Markov model has the shape {tuple(tensor.shape)}; "
                f"pass {shape}, since log_emissions has {regimes} regimes"
            )
