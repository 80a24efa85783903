"""``python -m exp``, and the command ``exp``."""

from __future__ import annotations

import sys

from exp import early

__all__ = ["main"]


def main() -> int:
    """Run the command line in ``sys.argv``; returns the exit code (docs/concepts/run.md)."""
    with early.listening():
        try:
            from exp.cli import main as run  # takes most of a second

            return run()
        except KeyboardInterrupt as interrupt:
            return early.tell(interrupt)


if __name__ == "__main__":
    sys.exit(main())
