from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
WORDS = (
    "cuda|cudnn|cublas|nvml|nccl|nvidia|gcu|eccl|xla|tops|efsmi|enflame|hip|rccl|rocm|miopen|amd"
    "|npu|hccl|mlu|cncl|musa|mccl"
)
# As words or as parts of identifiers (torch_gcu, CudaBackend), but not inside other words ("relationship", "stops").
PATTERN = re.compile(rf"(?<![A-Za-z])(?i:{WORDS})(?![A-Za-z])|(?:{WORDS.title()})(?![a-z])")


def test_vendors_are_named_in_their_places_only():
    files = [*(ROOT / "src" / "exp").rglob("*.py")]
    files += [path for path in (ROOT / "conf").rglob("*.yaml") if "backend" not in path.parts]
    assert len(files) > 50
    found = []
    for path in files:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if PATTERN.search(line) and path.name != "exp.yaml":  # the help text shows a command line for each
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert not found, "\n".join(found)
