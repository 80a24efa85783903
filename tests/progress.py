"""What ``make test`` shows: a bar while the tests run; at the end what they covered, and what was left out and why."""

from __future__ import annotations

import collections
import os
import re
import sys
import time
from typing import Any

import pytest

_BEHAVIOUR = re.compile(r"tests/behaviour/test_(\w+)\.py")


class Progress:
    """The controller's view of the tests that its workers, or it alone, run."""

    def __init__(self) -> None:
        self.total = self.done = self.failed = self.shown = self.left = 0
        self.begin = time.monotonic()
        self.covered: collections.Counter[str] = collections.Counter()
        self.skipped: collections.Counter[str] = collections.Counter()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.total = self.total or len(session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self.total = len(ids)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.left = max(self.left, getattr(node, "workeroutput", {}).get("left", 0))

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: Any) -> tuple[str, str, str] | None:
        """No dots: the bar says it. What fails is named at once."""
        if hasattr(report, "wasxfail") or not isinstance(report, pytest.TestReport):
            return None
        if report.failed:
            return "failed" if report.when == "call" else "error", "", ""
        return ("" if report.passed and report.when != "call" else report.outcome), "", ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        topic = _BEHAVIOUR.match(report.nodeid)
        if report.failed:
            self.failed += 1
            print(f"{self._back()}FAILED {report.nodeid}", flush=True)
        elif report.skipped and isinstance(report.longrepr, tuple):
            self.skipped[report.longrepr[2].replace("Skipped: ", "", 1)] += 1
        elif report.when == "call":
            self.covered[topic.group(1) if topic else ""] += 1

    def pytest_runtest_logfinish(self) -> None:
        self.done += 1
        tenths = 10 * self.done // max(self.total, 1)
        minutes, seconds = divmod(int(time.monotonic() - self.begin), 60)
        failed = f", {self.failed} failed" if self.failed else ""
        line = f"[{'#' * 3 * tenths:30}] {self.done} of {self.total}{failed}, {minutes}:{seconds:02}"
        if sys.stdout.isatty():
            print(f"{self._back()}{line}", end="\n" if self.done == self.total else "", flush=True)
        elif tenths > self.shown:
            print(line, flush=True)
        self.shown = tenths

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        units = self.covered.pop("", 0)
        topics = ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in sorted(self.covered.items()))
        say = terminalreporter.write_line
        say(f"covered: {topics or 'no behaviour'}; {units} tests of single modules")
        for reason, count in self.skipped.most_common():
            say(f"skipped: {count}, {reason}")
        if self.left:
            what = "simulated cards, Slurm, trackers, notebooks, the pages' commands, variants"
            say(f"left to `make test-all`: {self.left} tests ({what})")

    @staticmethod
    def _back() -> str:
        return "\r\x1b[K" if sys.stdout.isatty() else ""


class _Worker:
    """Counts what a worker of xdist leaves out."""

    def __init__(self, config: Any) -> None:
        self.output = config.workeroutput

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        self.output["left"] = self.output.get("left", 0) + len(items)


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workeroutput"):
        config.pluginmanager.register(_Worker(config))
    elif "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(Progress())
