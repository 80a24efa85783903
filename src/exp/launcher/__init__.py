"""Starts and supervises the workers of a run. The parent process does not import torch."""

from exp.launcher.base import Launcher, resolve
from exp.launcher.outcome import describe_failure

__all__ = ["Launcher", "describe_failure", "resolve"]
