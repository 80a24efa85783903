"""How workers are started and supervised. Nothing here imports torch in the parent process."""

from exp.launcher.base import Launcher, resolve
from exp.launcher.outcome import describe_failure

__all__ = ["Launcher", "describe_failure", "resolve"]
