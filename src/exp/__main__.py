"""``python -m exp``."""

import sys

from exp.cli import main

if __name__ == "__main__":
    sys.exit(main())
