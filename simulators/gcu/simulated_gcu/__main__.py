"""Command line, ``python -m simulated_gcu <command>``.

``path`` prints the folder for PYTHONPATH, ``library`` that of libefml.so.1 for LD_LIBRARY_PATH. ``build`` compiles the
native code now. ``efsmi [-q]`` prints the output of the vendor's monitor.
"""

from __future__ import annotations

import sys

import simulated_gcu
from simulated_gcu import monitor
from simulated_gcu.build import BuildError, extension, library


def main() -> int:
    """Run the command in ``sys.argv``; return the exit code."""
    command = sys.argv[1:]
    try:
        if command == ["path"]:
            print(simulated_gcu.path())
        elif command == ["build"]:
            print(extension())
        elif command == ["library"] and simulated_gcu.generation() == "current":
            path = library()
            assert path is not None
            print(path.parent)
        elif command in (["efsmi"], ["efsmi", "-q"]):
            print(monitor.report(detailed="-q" in command))
        else:
            print("usage: python -m simulated_gcu path|build|library|efsmi [-q]", file=sys.stderr)
            return 2
    except (BuildError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
