"""Draws the losses of one training on different hardware: ``python benchmarks/same_everywhere.py [--steps 40]``.

The default experiment is trained on one CPU process, on two, on eight simulated cards, and on the cards of this machine
if it has any, each time with the same seed and global batch. Prints the largest relative difference of a step's loss
from that of one CPU process, and writes ``docs/pictures/same_everywhere.png``.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

import exp

PICTURE = Path(__file__).parents[1] / "docs" / "pictures" / "same_everywhere.png"
HARDWARE = {
    "CPU, 1 process": ["backend=cpu"],
    "CPU, 2 processes": ["backend=cpu", "nproc=2"],
    "8 simulated GCU": ["backend=gcu_simulated", "nproc=8"],
}
COMMON = [
    "dropout_by_sample=true", "max_epochs=null", "log_every=1", "plots=false", "checkpoint.every_epochs=0",
    "debug.eval_batches=1", "val_every=100000",
]  # fmt: skip


def losses(folder: Path, *overrides: str) -> dict[int, float]:
    """The loss of each step of a run in ``folder``."""
    subprocess.run([sys.executable, "-m", "exp", *COMMON, *overrides, f"output_dir={folder}"], check=True)
    history = exp.open_run(folder).metrics
    return {int(step): float(loss) for step, loss in zip(history["step"], history["loss"]) if loss == loss}


def main() -> None:
    """Train on each, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--card", help="a backend of this machine's cards, such as cuda")
    arguments = parser.parse_args()
    hardware = {**HARDWARE, **({arguments.card: [f"backend={arguments.card}"]} if arguments.card else {})}
    with tempfile.TemporaryDirectory() as folder:
        runs = {
            name: losses(Path(folder) / str(number), f"max_steps={arguments.steps}", *overrides)
            for number, (name, overrides) in enumerate(hardware.items())
        }
    reference = runs["CPU, 1 process"]
    figure, (above, below) = plt.subplots(2, 1, sharex=True, figsize=(8, 4.5), height_ratios=(3, 2))
    for number, (name, values) in enumerate(runs.items()):
        style = {"lw": 7 - 2.2 * number, "alpha": (0.25, 0.5, 1.0, 1.0)[number], "color": f"C{number}"}
        above.plot(list(values), list(values.values()), label=name, **style)
        if number:
            differences = {step: abs(loss / reference[step] - 1) for step, loss in values.items()}
            print(f"{name}: {max(differences.values()):.1e}")
            drawn = {step: max(value, 1e-9) for step, value in differences.items()}
            below.semilogy(list(drawn), list(drawn.values()), "o", ms=3, color=f"C{number}")
    below.axhline(2**-23, color="gray", lw=1, ls="--")
    below.text(arguments.steps, 2**-23 * 1.3, "float32 has 7 digits", ha="right", fontsize=8, color="gray")
    above.set_ylabel("training loss")
    above.legend(frameon=False)
    below.set(ylabel="difference\nfrom 1 process", xlabel="step", ylim=(5e-10, 1e-4))
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(PICTURE, dpi=130)


if __name__ == "__main__":
    main()
