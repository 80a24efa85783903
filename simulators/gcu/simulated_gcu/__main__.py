"""``python -m simulated_gcu path``: the folder for PYTHONPATH. ``python -m simulated_gcu build``: compile now."""

from __future__ import annotations

import sys

import simulated_gcu
from simulated_gcu.build import BuildError, extension


def main() -> int:
    """Run the command in ``sys.argv``; returns the exit code."""
    command = sys.argv[1:]
    try:
        if command == ["path"]:
            print(simulated_gcu.path())
        elif command == ["build"]:
            print(extension())
        else:
            print("usage: python -m simulated_gcu path|build", file=sys.stderr)
            return 2
    except (BuildError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
