"""Writes the table of operators of one release of the vendor's plug-in, from the lists in its sources.

    python simulators/gcu/operator_table.py <sources of torch_gcu> > backends/torch_gcu-<release>.txt

Run it with the torch version of the release, or a later one: the table sorts the operators of this torch, overload by
overload. As in the vendor's code generator, the variants of one signature (in place, functional, ``out=``) follow the
one that is listed.
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import Any

import torch
import yaml

_BY_HAND = ("linear", "linear.out", "matmul", "matmul.out")  # RegisterLinearOverrideGCU.cpp
_COMPOSED = ("ExplicitAutograd", "ExplicitAutogradNonFunctional", "ImplicitAutograd")


def signature(name: str) -> tuple[Any, ...]:
    """What the variants of one operator have in common: its name without a trailing ``_``, and its input types."""
    base, _, overload = name.partition(".")
    arguments = torch._C._get_schema(f"aten::{base}", overload).arguments
    base = base[:-1] if base.endswith("_") and not base.endswith("__") else base
    return (base, *(str(argument.type) for argument in arguments if not argument.is_out))


def computed(name: str) -> bool:
    """Whether the dispatcher needs a kernel of the device for this overload, and the CPU has one."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return has(f"aten::{name}", "CPU") and not any(has(f"aten::{name}", f"Composite{kind}") for kind in _COMPOSED)


def sections(sources: Path) -> dict[str, set[str]]:
    """Overloads by section of the table."""
    listed = yaml.safe_load((sources / "codegen/gcu_native_functions.yaml").read_text())
    entries = [*listed["supported"], *listed.get("optional", ())]
    native = {entry["name"] for entry in entries if not entry.get("disable")} | set(_BY_HAND)
    sent = yaml.safe_load((sources / "codegen/gcu_op_fallback.yaml").read_text())["fallback"]

    groups: dict[tuple[Any, ...], set[str]] = {}
    for full in torch._C._dispatch_get_all_op_names():
        space, _, name = full.partition("::")
        if space == "aten":
            groups.setdefault(signature(name), set()).add(name)
    found: dict[str, set[str]] = {"card": set(), "cpu": set()}
    for group in groups.values():
        if group & native:
            # A foreach operator that is not listed runs tensor by tensor, with the kernels of the card.
            own = {name for name in group if name in native or not (computed(name) or name.startswith("_foreach_"))}
            found["card"] |= own
            found["cpu"] |= {name for name in group - own if computed(name)}
        elif any(map(computed, group)):
            found["cpu"] |= group
    found["card"] |= native
    for entry in sent:
        group = groups.get(signature(entry["name"]), set()) | {entry["name"]}
        for card in ("s60", "l600"):
            if card in entry:
                found.setdefault(f"cpu on {card}{_only(entry[card])}", set()).update(group & found["card"])
    return found


def _only(condition: Any) -> str:
    """Condition in a section heading: the values of an argument for which an operator runs on the CPU."""
    if condition == "all":
        return ""
    ((argument, values),) = condition[0].items()
    return f" if {argument}={values}"


def main() -> None:
    """Print the table."""
    print(textwrap.fill(__doc__.splitlines()[0], 118, initial_indent="# ", subsequent_indent="# "))
    print(f"# Made by simulators/gcu/operator_table.py with torch {torch.__version__.partition('+')[0]}.")
    for heading, names in sections(Path(sys.argv[1])).items():
        print(f"\n[{heading}]")
        print(textwrap.fill(" ".join(sorted(names)), 118, break_long_words=False, break_on_hyphens=False))


if __name__ == "__main__":
    main()
