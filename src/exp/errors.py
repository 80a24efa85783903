"""The exceptions of ``exp``: few types, told apart by what the caller can do about them.

Every message starts with one line that says what is wrong, where, and what to do; details may follow on later lines.
The exit codes are those of the command line (see docs/exit-codes.md).
"""

from __future__ import annotations

__all__ = [
    "EXIT_CONFIG",
    "EXIT_FAILED",
    "EXIT_OK",
    "EXIT_PREEMPTED",
    "EXIT_UNAVAILABLE",
    "REFUSED",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "ExpError",
    "PlacementError",
    "Preempted",
    "RunError",
    "SampleError",
    "UnavailableError",
]

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_CONFIG = 2
EXIT_UNAVAILABLE = 3
EXIT_PREEMPTED = 75

REFUSED = (EXIT_CONFIG, EXIT_UNAVAILABLE)
"""Exit codes of a run that has not begun: it leaves no folder."""


class ExpError(Exception):
    """Base class; ``exit_code`` is what the command line exits with."""

    exit_code = EXIT_FAILED


class ConfigError(ExpError):
    """The configuration or the usage is wrong: correct the command line (exit code 2)."""

    exit_code = EXIT_CONFIG


class DataError(ConfigError):
    """A data file is missing or malformed: correct the file or ``data.*`` (exit code 2)."""


class UnavailableError(ExpError):
    """The hardware, the scheduler or a dependency is not there (exit code 3)."""

    exit_code = EXIT_UNAVAILABLE


class RunError(ExpError):
    """The run itself failed (exit code 1)."""


class SampleError(RunError):
    """A sample of the user's data cannot be had, or samples make no batch; before the first step a ConfigError."""


class Preempted(ExpError):  # noqa: N818 - no error
    """The run was told to end, and its state is saved: ``resume=auto`` continues it (exit code 75).

    Args:
        step: optimizer steps completed.
    """

    exit_code = EXIT_PREEMPTED

    def __init__(self, step: int) -> None:
        super().__init__(f"preempted after step {step}")
        self.step = step


class PlacementError(RunError):
    """Parameters or buffers are not on the device of their rank."""


class CheckpointError(RunError):
    """A checkpoint cannot be read, or does not belong to this model."""
