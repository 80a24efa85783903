"""Time and memory of a transition prior with its hidden Markov model, against the straightforward form.

A step is the mean log-density of latents (16, T, C) under a stationary prior (one lag, one hidden layer), the mean
log-likelihood of a hidden Markov model of 4 regimes over the T steps, the gradients of both, and the best path.
The straightforward form loops over the latents with vmap(jacfwd(MLP)), of which it uses one column, and over time with
logsumexp; autograd computes its gradients. From 100 latents on both forms compress the lagged latents to 10 numbers.

Each measurement runs in a process of its own, the two forms in turns; the fastest step of each counts. The
straightforward form keeps every latent's Jacobian until the backward pass. If that takes more than --memory, it is
measured on fewer latents, and time and memory are scaled up in proportion; such figures are marked with ~.

    python benchmarks/transition_prior.py [--rounds 2] [--threads 2] [--memory 6] [--latents 7 21 321] [--hidden 64]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Callable

import torch
from torch import nn

from exp.forecasting.timebridge.density import NEGATIVE_SLOPE, gaussian_log_density, log_square
from exp.forecasting.timebridge.hmm import log_likelihood, viterbi
from exp.forecasting.timebridge.prior import StationaryPrior

BATCH, REGIMES, COMPRESSED = 16, 4, 10
HIDDEN = {7: (64, 384), 21: (64, 384), 321: (64, 3)}
"""Hidden units: 64, and what users of such a prior train with."""


class PlainPrior(nn.Module):
    """The straightforward form, with the weights of ours; only the first ``measured`` latents have an MLP."""

    def __init__(self, prior: StationaryPrior, measured: int) -> None:
        super().__init__()
        self.compress = prior.compress
        first, last = prior.mlps.layers
        self.mlps = nn.ModuleList()
        for latent in range(measured):
            mlp = nn.Sequential(
                nn.Linear(first.weight.shape[2], first.weight.shape[1]),
                nn.LeakyReLU(NEGATIVE_SLOPE),
                nn.Linear(first.weight.shape[1], 1),
            )
            for module, layer in ((mlp[0], first), (mlp[2], last)):
                module.load_state_dict({"weight": layer.weight[latent], "bias": layer.bias[latent]})
            self.mlps.append(mlp)

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        """Mean log-density of the steps with a past, of the measured latents."""
        from torch.func import jacfwd, vmap

        context = self.compress(z[:, :-1].flatten(0, 1))
        now = z[:, 1:].flatten(0, 1)
        log_derivative: Any = 0
        noise = []
        for latent, mlp in enumerate(self.mlps):
            inputs = torch.cat([context, now[:, latent : latent + 1]], dim=-1)
            noise.append(mlp(inputs))
            jacobian = vmap(jacfwd(mlp))(inputs).squeeze(1)
            log_derivative = log_derivative + log_square(jacobian[:, -1]) / 2
        return (gaussian_log_density(torch.cat(noise, dim=-1)) + log_derivative).mean()


def plain_hmm(emissions: torch.Tensor, initial: torch.Tensor, transition: torch.Tensor) -> torch.Tensor:
    """Mean log-likelihood by a loop over time; the path is computed and discarded, as in ours."""
    message = initial + emissions[:, 0]
    for t in range(1, emissions.shape[1]):
        message = emissions[:, t] + torch.logsumexp(message.unsqueeze(2) + transition, dim=1)
    with torch.no_grad():
        score, pointers = initial + emissions[:, 0], []
        for t in range(1, emissions.shape[1]):
            values, indices = (score.unsqueeze(2) + transition).max(dim=1)
            score = emissions[:, t] + values
            pointers.append(indices)
        path = [score.argmax(dim=1, keepdim=True)]
        for pointer in reversed(pointers):
            path.append(pointer.gather(1, path[-1]))
    return torch.logsumexp(message, dim=1).mean()


def our_hmm(emissions: torch.Tensor, initial: torch.Tensor, transition: torch.Tensor) -> torch.Tensor:
    """Mean log-likelihood; the path is computed and discarded."""
    viterbi(emissions, initial, transition)
    return log_likelihood(emissions, initial, transition).mean()


def parts(form: str, latents: int, measured: int, hidden: int, steps: int) -> dict[str, Callable[[], Any]]:
    """Forward and backward passes of the prior and of the hidden Markov model, from fixed random numbers."""
    torch.manual_seed(0)
    prior = StationaryPrior(latents, hidden=hidden, compressed=COMPRESSED if latents > 100 else None)
    z = torch.randn(BATCH, steps, latents, requires_grad=True)
    emissions = torch.randn(BATCH, steps, REGIMES, requires_grad=True)
    initial = torch.randn(REGIMES, requires_grad=True)
    transition = torch.randn(REGIMES, REGIMES, requires_grad=True)
    plain = PlainPrior(prior, measured)

    def prior_step() -> float:
        density = plain(z) if form == "plain" else prior(z)[:, 1:].mean()
        density.backward()
        return float(density.detach())

    def hmm_step() -> float:
        hmm = plain_hmm if form == "plain" else our_hmm
        likelihood = hmm(emissions, torch.log_softmax(initial, 0), torch.log_softmax(transition, 1))
        likelihood.backward()
        return float(likelihood.detach())

    return {"prior": prior_step, "hmm": hmm_step}


def resident() -> float:
    """The process's resident memory, MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def measure(form: str, latents: int, measured: int, hidden: int, steps: int) -> dict[str, float]:
    """Times in seconds, the fastest of two to ten within two seconds; the prior's peak memory above the inputs, MiB."""
    for step in parts(form, min(latents, 3), min(measured, 3), hidden, 50).values():
        step()  # one-time set-up of threads, kernels and functorch
    result = {}
    for name, step in parts(form, latents, measured, hidden, steps).items():
        before = resident()
        started = time.perf_counter()
        for repeat in range(10):
            if repeat >= 2 and time.perf_counter() - started > 2.0:
                break
            begun = time.perf_counter()
            result[name + "_value"] = step()
            seconds = time.perf_counter() - begun
            result[name] = min(result.get(name, seconds), seconds)
            if name == "prior":
                peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
                result["memory"] = max(peak - before, 0.0)
    return result


def in_a_process(threads: int, *arguments: Any) -> dict[str, float]:
    """:func:`measure` in a new process."""
    command = [sys.executable, __file__, "--threads", str(threads), "--measure", json.dumps(arguments)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    return json.loads(output)


def compare(latents: int, hidden: int, steps: int, options: argparse.Namespace) -> None:
    """Measure one size and print its row."""
    context = COMPRESSED if latents > 100 else latents
    # Each latent's Jacobian columns are kept after the linear layer and after LeakyReLU.
    kept = 2 * BATCH * steps * (context + 2) * hidden * 4 / 2**30
    measured = max(min(latents, int(options.memory / kept)), 1)
    found: dict[str, list[dict[str, float]]] = {"plain": [], "exp": []}
    for _ in range(options.rounds):
        for form, rounds in found.items():
            rounds.append(in_a_process(options.threads, form, latents, measured, hidden, steps))
    best = {form: {name: min(one[name] for one in rounds) for name in rounds[0]} for form, rounds in found.items()}
    plain, ours = best["plain"], best["exp"]
    assert abs(plain["hmm_value"] / ours["hmm_value"] - 1) < 1e-4, "the log-likelihoods differ"
    if measured == latents:
        assert abs(plain["prior_value"] / ours["prior_value"] - 1) < 1e-4, "the log-densities differ"
    mark = " " if measured == latents else "~"
    plain["prior"] *= latents / measured
    plain["memory"] *= latents / measured
    totals = plain["prior"] + plain["hmm"], ours["prior"] + ours["hmm"]
    print(
        f"{latents:>7} {hidden:>6} {steps:>5} {measured:>8} |"
        f"{mark}{plain['prior']:7.2f} {plain['hmm']:6.2f} |{ours['prior']:7.3f} {ours['hmm']:6.3f} |"
        f"{mark}{totals[0] / totals[1]:6.0f} x |{mark}{plain['memory']:8.0f} {ours['memory']:6.0f}",
        flush=True,
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--memory", type=float, default=6.0, help="GiB that the straightforward form may take")
    parser.add_argument("--latents", type=int, nargs="+", default=[7, 21, 321])
    parser.add_argument("--steps", type=int, nargs="+", default=[816, 1440])
    parser.add_argument("--hidden", type=int, nargs="+", help="hidden units; default: 64 and what users train with")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.measure:
        print(json.dumps(measure(*json.loads(options.measure))), flush=True)
        os._exit(0)  # skips the interpreter's shutdown, which may race with autograd's threads
    if not hasattr(torch, "func"):
        parser.error("the straightforward form needs torch.func, which is in torch >= 2.0")
    print(f"torch {torch.__version__}, {options.threads} threads, batch {BATCH}; seconds, MiB; forward and backward")
    print("latents hidden steps measured |  plain prior, hmm |   exp prior, hmm | together |    MiB plain, exp")
    for latents in options.latents:
        for hidden in options.hidden or HIDDEN.get(latents, (64,)):
            for steps in options.steps:
                compare(latents, hidden, steps, options)


if __name__ == "__main__":
    main()
