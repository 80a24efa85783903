"""What :func:`exp.run` starts: the command line, and a note of where its runs lie.

The command line alone knows: quotes, interpolations and files decide on it as well as ``output_dir=``.
"""

from __future__ import annotations

import sys
from pathlib import Path

from exp.__main__ import main as command_line
from exp.runs.files import write_json

__all__ = ["main"]


def main() -> int:
    """``python -m exp.child NOTE [ARGUMENT ...]``: ``python -m exp [ARGUMENT ...]``; NOTE is the file to write.

    Returns:
        The exit code of the command line.
    """
    note = Path(sys.argv.pop(1)).absolute()
    code = command_line()
    from exp import cli  # once signals are listened to, as __main__ does

    write_json(note, {"runs": list(map(str, cli.left.runs)), "several": cli.left.several})
    return code


if __name__ == "__main__":
    sys.exit(main())
