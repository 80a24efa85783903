"""launcher=local: one worker, in this process."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

from exp.errors import EXIT_OK, ConfigError
from exp.launcher.base import Launcher, Outcome, RankInfo
from exp.launcher.failures import collect_failures, exit_code_of

if TYPE_CHECKING:
    from exp.runfolder import RunFolder

__all__ = ["LocalLauncher"]


class LocalLauncher(Launcher):
    """Runs the only worker here."""

    def check(self, nproc: int) -> None:
        """Refuse several workers, restarts and nodes."""
        if nproc != 1:
            raise ConfigError(f"nproc={nproc} needs launcher=torchrun; launcher=local runs one process, this one")
        if self.max_restarts:
            raise ConfigError("launcher.max_restarts needs launcher=torchrun; launcher=local cannot restart itself")
        if self.nnodes != 1:
            raise ConfigError(f"launcher.nnodes={self.nnodes} needs launcher=torchrun")

    def launch(self, folder: RunFolder, nproc: int) -> Outcome:
        """Run the worker; an error of it becomes the outcome, as with any other launcher."""
        from exp.worker import run_worker

        before = {number: signal.signal(number, _interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
        try:
            run_worker(folder, RankInfo.single(), redirect=False)
        except _Interrupted as interruption:
            return _interrupted(interruption.number)
        except KeyboardInterrupt:
            return _interrupted(signal.SIGINT)
        # The worker has written its error file; every error ends here, in the same words as those of other launchers.
        except Exception:  # noqa: BLE001
            failures = collect_failures(folder, [], "")
            return Outcome(exit_code_of(failures[0]), failures=failures)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        return Outcome(EXIT_OK)


class _Interrupted(BaseException):
    """A signal has come; passes through ``except Exception`` as KeyboardInterrupt does."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def _interrupt(number: int, _frame: Any) -> None:
    raise _Interrupted(number)


def _interrupted(number: int) -> Outcome:
    return Outcome(128 + number, interrupted_by=signal.Signals(number).name)
