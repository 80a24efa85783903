"""The table of a card: every row runs on the CPU, so that time on a card is not spent on mistakes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

# scenes_b differs from scenes_s in its size alone, which is tiny here.
ROWS = ["scenes_s", "scenes_s_compiled", "segmentation_l", "segmentation_l_compiled", "overhead", "waits", "timebridge",
        "checkpoint", "loading", "segformer", "frozen", "fsdp"]  # fmt: skip
SCRIPT = Path(__file__).parents[1] / "benchmarks" / "card.py"


@pytest.mark.extended
def test_every_row_of_the_table_of_a_card_runs_at_tiny_sizes(tmp_path):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--device", "cpu", "--small", "--commit", "abc123", "--rows", *ROWS],
        cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    found = json.loads((tmp_path / "card.json").read_text())
    assert (done.returncode, found["failed"]) == (0, {}), done.stderr
    ours = [line for line in found["lines"] if line["what"].startswith("exp")]
    names = ["a tiny step", "values read", "TimeBridge", "a checkpoint", "loading JPEG", "SegFormer-B0"]
    kinds = [f"{task}, tiny, 64 px, batch 2, {how}" for task in ("scenes", "segmentation") for how in ("eager", "comp")]
    missing = [name for name in [*names, *kinds] if not any(line["row"].startswith(name) for line in ours)]
    assert missing == []
    assert all(line["value"] >= 0 for line in ours)
    table = (tmp_path / "card.md").read_text()
    assert "commit abc123" in table
    assert all(f"| {line['row']} | {line['what']} |" in table for line in ours)
