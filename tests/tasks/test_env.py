from __future__ import annotations

import json
import time

import exp as package


def test_facts_to_paste_into_a_bug_report(exp):
    started = time.monotonic()
    done = exp("task=env", "backend=cpu", "output_dir=run", AWS_SECRET_ACCESS_KEY="hush", TORCH_LOGS="+dynamo")
    assert time.monotonic() - started < 120  # some three seconds on a machine at rest
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"exp            {package.__version__}")
    for beginning in ("python ", "platform ", "packages ", "devices", "monitor ", "limits", "variables"):
        assert any(line.startswith(beginning) for line in lines), done.stdout
    assert any(line.startswith("  cpu ") and "available" in line for line in lines)
    assert any(line.startswith("  cuda ") and "not available: " in line for line in lines)
    assert "  TORCH_LOGS=+dynamo" in lines
    assert "hush" not in done.stdout
    assert "\x1b" not in done.stdout
    text = (exp.path("run") / "env.json").read_text()
    assert "hush" not in text
    environment = json.loads(text)
    assert environment["packages"]["torch"]
    assert environment["limits"]["open_files"]
    assert environment["devices"][0]["device"] == "cpu"
    assert exp.result("run")["status"] == "completed"


def test_a_backend_that_is_not_there_is_what_the_report_is_about(exp):
    done = exp("task=env", "backend=gcu", "output_dir=run")
    assert done.returncode == 0, done.stderr
    assert "gcu          not available: looked for the package torch_gcu" in done.stdout
    assert "devices        none" in done.stdout


def test_several_processes_are_for_the_doctor(exp):
    done = exp("task=env", "backend=cpu", "nproc=2")
    assert done.returncode == 2
    assert "task=doctor" in done.stderr
