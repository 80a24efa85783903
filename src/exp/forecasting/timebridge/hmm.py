"""Hidden Markov model: the regimes of a multivariate series, and log-likelihood and most probable path of sequences.

Log-likelihood and path take log p(x_t | regime) of every step and the log-probabilities of the first regime and of the
transitions. They work in float32 and the log domain with messages normalized at every step, so that neither long
sequences nor improbable observations under- or overflow. An associative scan over time computes the messages in log2(T)
dependent steps of K**3 work: 10 ms for 16 sequences of 1440 steps and 4 regimes on one thread of a server CPU; a loop
over time, T steps of K**2 work, takes 40 ms. On a card the scan launches about 550 kernels, the loop 14,000.

Log-probabilities below ``LOG_FLOOR``, also -inf, count as ``LOG_FLOOR``: a transition of probability zero is never
taken if there is another path, and its expected count and gradient are 0. An impossible sequence has a log-likelihood
of about ``LOG_FLOOR``, not -inf, and finite gradients.

The relative error of messages is float32's 6e-8, of the log-ratios between regimes. These grow with the length of the
sequence if regimes do not communicate (transitions of probability zero).
"""

from __future__ import annotations

import math
from typing import Any, Callable

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from exp.hardware.compat import autocast_disabled

# Smallest log-probability: far below that of any real observation, and about 1e8 of them sum without overflow.
LOG_FLOOR = -1e30
# Lower bound of an emission's standard deviation.
MIN_STD = 0.1
# Initial logit of staying in a regime, relative to 0 for each other regime: with 0, initial paths would be noise.
_INITIAL_STAY_LOGIT = 2.0

_Reduce = Callable[[torch.Tensor, int], torch.Tensor]


def log_likelihood(
    log_emissions: torch.Tensor, log_initial: torch.Tensor, log_transition: torch.Tensor
) -> torch.Tensor:
    """Log-likelihood log p(x_1 ... x_T) by the forward algorithm (Rabiner, Proc. IEEE 77(2), 1989, sec. III A).

    Its gradients are the posteriors for the emissions and the expected counts for the transitions (Fisher's identity),
    from backward messages that the forward pass computes along with the forward ones. Differentiable once.

    Args:
        log_emissions: (B, T, K), T at least 2: log p(x_t | regime); densities may exceed 1, so values may be positive.
        log_initial: (K,), log p(first regime).
        log_transition: (K, K), log p(to | from) at [from, to]; each row's probabilities must sum to 1 (not checked).

    Returns:
        (B,), float32. The backward pass holds B T K**2 numbers for a moment if ``log_transition`` needs a gradient.
    """
    inputs = (log_emissions, log_initial, log_transition)
    # Here, since gradients are always disabled within a Function.
    with_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
    with autocast_disabled(log_emissions.device.type):
        result: torch.Tensor = _LogLikelihood.apply(*(tensor.float() for tensor in inputs), with_gradient)
    return result


@torch.no_grad()
def viterbi(log_emissions: torch.Tensor, log_initial: torch.Tensor, log_transition: torch.Tensor) -> torch.Tensor:
    """The most probable path (Viterbi 1967; Rabiner, Proc. IEEE 77(2), 1989, sec. III B).

    Ties go to the lowest regime, from the last step backwards. If the probabilities of two paths differ only by float32
    rounding, either may be returned.

    Args:
        log_emissions: (B, T, K), T at least 2.
        log_initial: (K,).
        log_transition: (K, K).

    Returns:
        (B, T), int64.
    """
    with autocast_disabled(log_emissions.device.type):
        inputs = (tensor.float() for tensor in (log_emissions, log_initial, log_transition))
        emissions, _, initial, transition = _prepare(*inputs)
        scores = _messages(emissions, initial, transition, False, _maximum, _shift_max_to_zero)[0] + emissions
        scores = scores - scores.amax(1, keepdim=True)
        pointers = _best_origins(scores[:-1], transition)
        last = _best_origins(scores[-1:], torch.zeros_like(transition[:, :1])).flatten()
        return _backtrace(pointers, last).t().contiguous()


def _prepare(emissions: torch.Tensor, initial: torch.Tensor, transition: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Apply ``LOG_FLOOR``, and put the batch last, so that reductions over regimes run along contiguous memory.

    Returns:
        Emissions (T, K, B), whose largest of each step is 0; the values subtracted for that, (T, B); the initial and
        the transition log-probabilities.
    """
    emissions = emissions.clamp_min(LOG_FLOOR).permute(1, 2, 0).contiguous()
    peaks = emissions.amax(1)  # large negative values would cost the messages precision
    emissions = (emissions - peaks.unsqueeze(1)).clamp_min_(LOG_FLOOR)
    return emissions, peaks, initial.clamp_min(LOG_FLOOR), transition.clamp_min(LOG_FLOOR)


class _LogLikelihood(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, emissions: torch.Tensor, initial: torch.Tensor, transition: torch.Tensor, with_gradient: bool
    ) -> torch.Tensor:
        emissions, peaks, initial, transition = _prepare(emissions, initial, transition)
        predicted, future = _messages(emissions, initial, transition, with_gradient, _log_sum_exp, _log_normalize)
        joint = predicted + emissions
        result = (torch.logsumexp(joint, 1) + peaks).sum(0)  # log p(x_t | x_<t) of every step
        if future is not None:
            filtered = torch.log_softmax(joint, 1)
            ctx.save_for_backward(predicted, filtered, torch.log_softmax(filtered + future, 1), transition)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        predicted, filtered, log_posterior, transition = ctx.saved_tensors
        emissions_grad = initial_grad = transition_grad = None
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
            weighted = log_posterior.exp() * grad
            emissions_grad, initial_grad = weighted.permute(2, 0, 1), weighted[0].sum(1)
        if ctx.needs_input_grad[2]:
            # p(from, to | x) = p(from | to, x_<=t) p(to | x). In this order large numbers cancel before small ones
            # are added.
            pairs = (filtered[:-1].unsqueeze(2) + transition[:, :, None]).sub_(predicted[1:].unsqueeze(1))
            pairs = pairs.add_(log_posterior[1:].unsqueeze(1)).exp_()
            transition_grad = pairs.mul_(grad).sum((0, 3))
        return emissions_grad, initial_grad, transition_grad, None


def _messages(
    emissions: torch.Tensor,
    initial: torch.Tensor,
    transition: torch.Tensor,
    with_future: bool,
    reduce: _Reduce,
    normalize: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The forward and backward messages (Rabiner, Proc. IEEE 77(2), 1989, eqs. 19-25), normalized at every step.

    An associative scan over time: up a tree with products of K x K matrices, down with vectors only (Blelloch, "Prefix
    sums and their applications", 1990; for hidden Markov models Hassan, Sarkka and Garcia-Fernandez, arXiv 2102.05743).

    Args:
        emissions: (T, K, B), log p(x_t | regime); finite, at most 0.
        initial: (K,), log p(first regime); finite.
        transition: (K, K), log p(to | from) at [from, to]; finite.
        with_future: whether to compute the backward messages, too.
        reduce: reduction over regimes: log-sum-exp, or the maximum for the score of the best path into each regime.
        normalize: normalizes the messages of each step, (K, T, B).

    Returns:
        ``predicted`` (T, K, B), log p(regime_t | x_<t); ``future`` (T, K, B), log p(x_>t | regime_t) up to a constant
        for each step, or None.
    """

    def product(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        joined = reduce(first.unsqueeze(2) + second.unsqueeze(0), 1)
        return joined - joined.amax((0, 1), keepdim=True)

    start = initial.view(-1, 1).expand(emissions.shape[1:]).unsqueeze(1)
    matrix = transition[:, :, None, None]
    # (K, T - 1, B) each, up to constants: the forward message before step t's emission, and the backward message after
    # step t with the emission of step t + 1.
    before, after = start, emissions[-1].unsqueeze(1) if with_future else None
    for first, second, count in reversed(_tree(emissions[:-1].transpose(0, 1).unsqueeze(1) + matrix, product, dim=2)):
        pairs = first.shape[2]
        message = before[:, :pairs]
        before = _interleave(message, _shift_max_to_zero(reduce(message.unsqueeze(1) + first, 0)), before, count)
        if after is not None:
            message = after[:, :pairs]
            after = _interleave(_shift_max_to_zero(reduce(message.unsqueeze(0) + second, 1)), message, after, count)
    # One more step from each boundary restores the constants that the scan has dropped.
    filtered = normalize(before + emissions[:-1].transpose(0, 1))
    predicted = torch.cat([start, reduce(filtered.unsqueeze(1) + matrix, 0)], 1).transpose(0, 1)
    if after is None:
        return predicted, None
    future = reduce(normalize(after).unsqueeze(0) + matrix, 1)
    return predicted, torch.cat([future, torch.zeros_like(start)], 1).transpose(0, 1)


def _backtrace(pointers: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """Follow pointers from the last step to the first, by an associative scan.

    A segment of time maps the regime after it to the regime before it; composition of such maps is associative.

    Args:
        pointers: (T - 1, K, B), int64: the regime at step t from which the regime at step t + 1 is best reached.
        last: (B,), int64, the regime at the last step.

    Returns:
        (T, B), int64.
    """
    after = last.view(1, 1, -1)
    tree = _tree(pointers.transpose(0, 1), lambda first, second: first.gather(0, second), dim=1)
    for first, second, count in reversed(tree):
        paired = after[:, : first.shape[1]]
        after = _interleave(second.gather(0, paired), paired, after, count)
    before = pointers.gather(1, after.transpose(0, 1)).squeeze(1)
    return torch.cat([before, last.unsqueeze(0)])


def _tree(
    leaves: torch.Tensor, combine: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], dim: int
) -> list[tuple[torch.Tensor, torch.Tensor, int]]:
    """Combine neighbors along ``dim`` until one is left; an odd one at the end moves up unchanged.

    Returns:
        For each level, from the leaves upwards: first partners, second partners, and the number of elements.
    """
    levels = []
    count = leaves.shape[dim]
    while count > 1:
        pairs = leaves.narrow(dim, 0, count // 2 * 2).unflatten(dim, (count // 2, 2))
        first, second = (partner.contiguous() for partner in pairs.unbind(dim + 1))
        levels.append((first, second, count))
        unpaired = leaves.narrow(dim, count - count % 2, count % 2)
        leaves = torch.cat([combine(first, second), unpaired], dim)
        count = leaves.shape[dim]
    return levels


def _interleave(first: torch.Tensor, second: torch.Tensor, parents: torch.Tensor, count: int) -> torch.Tensor:
    """Interleave two (K, pairs, B) to (K, count, B); if ``count`` is odd, the last element is its parent."""
    children = torch.stack([first, second], 2).flatten(1, 2)
    return torch.cat([children, parents[:, first.shape[1] :]], 1) if count % 2 else children


def _best_origins(scores: torch.Tensor, transition: torch.Tensor) -> torch.Tensor:
    """The lowest i that maximizes scores[t, i, b] + transition[i, j] for each t, j and b.

    A loop over regimes, since argmax is slower and does not return the lowest index of a tie on every device.

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


def _log_sum_exp(x: torch.Tensor, dim: int) -> torch.Tensor:
    # torch.logsumexp with less memory traffic: x is not used again, so the exponentials overwrite it.
    peak = x.amax(dim, keepdim=True)
    return x.sub_(peak).exp_().sum(dim).log_().add_(peak.squeeze(dim))


def _maximum(x: torch.Tensor, dim: int) -> torch.Tensor:
    return x.amax(dim)


def _log_normalize(x: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(x, 0)


def _shift_max_to_zero(x: torch.Tensor) -> torch.Tensor:
    return x - x.amax(0, keepdim=True)


class Regimes(nn.Module):
    """The regimes of standardized series: a hidden Markov model with Gaussian emissions, learned first, then frozen.

    Only :meth:`negative_log_likelihood` trains it. :meth:`freeze` copies the parameters; from then on :meth:`path` uses
    the copy, so that further optimizer steps do not change paths.

    Args:
        count: number of regimes (K).
        channels: number of series, from the first on, that are observed (D).
    """

    frozen: torch.Tensor

    def __init__(self, count: int, channels: int) -> None:
        super().__init__()
        self.channels = channels
        self.means = nn.Parameter(torch.randn(count, channels))
        self.raw_stds = nn.Parameter(torch.zeros(count, channels))
        self.initial = nn.Parameter(torch.zeros(count))
        self.transition = nn.Parameter(_INITIAL_STAY_LOGIT * torch.eye(count))
        self.register_buffer("frozen", torch.zeros(()))  # 0 or 1; gloo of torch 1.10 carries no bool
        for name, parameter in self.named_parameters():
            self.register_buffer(f"frozen_{name}", parameter.detach().clone())

    def freeze(self) -> None:
        """Keep the regimes as they are now; a second call changes nothing."""
        if bool(self.frozen):
            return
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                full = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter  # sharded
                getattr(self, f"frozen_{name}").copy_(full)
            self.frozen.fill_(1.0)

    def negative_log_likelihood(self, series: torch.Tensor) -> torch.Tensor:
        """-log p(series) per time step, mean over the batch.

        Args:
            series: float32 (B, T, C), C >= D.

        Returns:
            0-dim float32.
        """
        emissions = _emissions(series[..., : self.channels], self.means, self.raw_stds)
        chain = log_likelihood(emissions, self.initial.log_softmax(0), self.transition.log_softmax(1))
        return -chain.mean() / series.shape[1]

    @torch.no_grad()
    def path(self, series: torch.Tensor, frozen: bool) -> torch.Tensor:
        """The most probable regime of every step.

        Args:
            series: (B, T, C).
            frozen: whether :meth:`freeze` has been called; an argument, since reading the buffer would synchronize with
                the device.

        Returns:
            (B, T), int64.
        """
        names = ("means", "raw_stds", "initial", "transition")
        means, raw_stds, initial, transition = (getattr(self, f"frozen_{name}" if frozen else name) for name in names)
        emissions = _emissions(series[..., : self.channels], means, raw_stds)
        return viterbi(emissions, initial.log_softmax(0), transition.log_softmax(1))


def _emissions(x: torch.Tensor, means: torch.Tensor, raw_stds: torch.Tensor) -> torch.Tensor:
    """Log N(x; mean, std) of every regime, std = softplus(raw_std) + 0.1: (B, T, D) -> (B, T, K).

    In float32 under autocast, too: large products cancel here, and bfloat16 keeps only three digits of them.
    """
    with autocast_disabled(x.device.type):
        x = x.float()
        std = F.softplus(raw_stds) + MIN_STD
        # The square is expanded into two matrix products, which avoids a tensor (B, T, K, D).
        precision = 1.0 / (std * std)
        quadratic = (x * x) @ precision.t() - 2.0 * (x @ (means * precision).t()) + (means * means * precision).sum(1)
        return -0.5 * quadratic - std.log().sum(1) - 0.5 * math.log(2.0 * math.pi) * x.shape[-1]
