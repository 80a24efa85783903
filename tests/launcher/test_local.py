"""The local launcher: one worker in this process; its errors and signals become outcomes."""

from __future__ import annotations

import os
import signal
import warnings

import pytest

from exp.errors import ConfigError, UnavailableError
from exp.launcher import describe_failure
from exp.launcher.local import LocalLauncher
from exp.runfolder import RunFolder, read_json, write_json


@pytest.fixture
def launch(tmp_path, monkeypatch):
    """Launches a function in place of the session."""
    folder = RunFolder(tmp_path / "run")
    folder.create()

    def start(body):
        monkeypatch.setattr("exp.session.run", body)
        return LocalLauncher().launch(folder, nproc=1)

    start.folder = folder
    return start


def test_a_worker_that_ends_well(launch):
    places = []

    def body(folder, info):
        places.append((folder.path, info.rank, info.world_size, info.restart_count))
        warnings.warn("a warning goes to the log", stacklevel=1)

    outcome = launch(body)
    assert outcome.exit_code == 0
    assert places == [(launch.folder.path, 0, 1, 0)]
    assert "a warning goes to the log" in launch.folder.log_file(0).read_text()


def fail(error):
    def body(folder, info):
        raise error

    return body


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (ValueError("not this"), 1, f"failed: {__name__}.body raises ValueError: not this (test_local.py, line 46)"),
        (UnavailableError("no card; get one"), 3, "failed: no card; get one"),
        (ConfigError("lr is wrong; correct it"), 2, "failed: lr is wrong; correct it"),
        (SystemExit("a library gave up"), 1, "failed: SystemExit: a library gave up"),
    ],
)
def test_an_error_becomes_the_outcome(launch, error, code, text):
    outcome = launch(fail(error))
    assert outcome.exit_code == code
    assert describe_failure(outcome).splitlines()[0].endswith(text)
    assert "Traceback" in launch.folder.log_file(0).read_text()
    assert read_json(launch.folder.error_file(0))["pid"] == os.getpid()


def test_errors_of_an_earlier_launch_are_forgotten(launch):
    write_json(launch.folder.error_file(3), {"rank": 3})
    outcome = launch(fail(ValueError("the new one")))
    (failure,) = outcome.failures
    assert "ValueError: the new one (" in failure.message
    assert launch(lambda folder, info: None).exit_code == 0
    assert not list(launch.folder.logs.glob("*.error.json"))


def test_an_error_that_cannot_be_written_is_told_all_the_same(launch):
    def body(folder, info):
        folder.log_file(0).unlink()
        folder.logs.rmdir()
        folder.logs.write_text("in the way")
        raise ValueError("lost")

    outcome = launch(body)
    assert outcome.exit_code == 1
    assert ".body raises ValueError: lost (test_local.py, line " in describe_failure(outcome)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_ends_it(launch, number, code):
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]

    def body(folder, info):
        os.kill(os.getpid(), number)
        signal.pause()

    outcome = launch(body)
    assert (outcome.exit_code, outcome.interrupted_by) == (code, number.name)
    assert not outcome.failures
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before


@pytest.mark.parametrize(
    ("settings", "nproc", "text"),
    [
        ({}, 2, "nproc=2 needs launcher=torchrun"),
        ({"max_restarts": 1}, 1, "launcher.max_restarts needs launcher=torchrun"),
        ({"nnodes": 2, "rdzv_endpoint": "h:1"}, 1, "launcher.nnodes=2 needs launcher=torchrun"),
    ],
)
def test_what_it_cannot_do_is_refused(settings, nproc, text):
    with pytest.raises(ConfigError, match=text):
        LocalLauncher(**settings).check(nproc)
