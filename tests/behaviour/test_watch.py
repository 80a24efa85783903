"""task=watch: the ranks of a run and the cards of this host, beside the run, which nothing disturbs."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import shutil
import signal
import struct
import subprocess
import termios
import time

import pytest

from tests.behaviour.conftest import LONG, ROOT, family, first_line, has_steps, ran, wait_for
from tests.conftest import clean_environment

CARDS = """
import json, os
from acme_backend import AcmeBackend

class Cards(AcmeBackend):
    rank = 0

    def worker_env(self, local_rank, *more, **options):
        self.rank = local_rank
        return super().worker_env(local_rank, *more, **options)

    def device_info(self, device):
        return {**super().device_info(device), "card": self.rank}

    def monitor(self):
        card = {"name": "Acme X1", "memory_total": 32 * 2**30, "memory_used": 2**30, "temperature_c": 41.0}
        foreign = [int(os.environ["FOREIGN"])]
        return [{**card, "index": index, "utilization_percent": use, "processes": foreign * (index == 2)}
                for index, use in enumerate((93.0, 88.0, 97.0, 0.0))]
"""


def snapshot(exp, *words, **environment):
    return json.loads(ran(exp, "task=watch", "task.format=json", *words, **environment).stdout)


@pytest.fixture
def cards(exp, page):
    """The arguments for a backend whose monitor reports four cards, the last idle; another program uses the third."""
    page("add-a-backend", python=["acme_backend.py", "my_vendors.py"], yaml=["my_conf/backend/acme.yaml"])
    (exp.folder / "cards.py").write_text(CARDS)
    (exp.folder / "my_conf" / "backend" / "cards.yaml").write_text("_target_: cards.Cards\nname: cards\n")
    return ["--config-dir", "my_conf", "backend=cards"]


@pytest.mark.legacy
def test_the_ranks_of_a_run_and_all_cards_of_the_host_are_shown_and_the_run_goes_on(exp, start, cards):
    environment = {"FOREIGN": str(os.getpid())}
    settings = [word for word in LONG if not word.startswith("backend=")]
    process = start(*cards, *settings, "nproc=2", "output_dir=run", "log_every=1", **environment)
    wait_for(has_steps(exp.path("run"), 3), process)
    seen = snapshot(exp, *cards, "run=run", **environment)
    assert (seen["run"], seen["status"]) == (str(exp.path("run")), "running")
    assert [rank["rank"] for rank in seen["ranks"]] == [0, 1]
    for rank in seen["ranks"]:
        assert rank["pid"] in family(process.pid)
        assert rank["step"] >= 3
        assert rank["stage"] in ("data", "forward", "backward", "hooks")
        assert rank["steps_per_second"] > 0
    assert [card["idle"] for card in seen["cards"]] == [False, False, False, True]
    first, _, third, last = seen["cards"]
    assert (first["temperature_c"], first["memory_total"]) == (41.0, 32 * 2**30)
    assert [(each["pid"], each["rank"]) for each in first["processes"]] == [(seen["ranks"][0]["pid"], 0)]
    assert [(each["pid"], each["rank"]) for each in third["processes"]] == [(os.getpid(), None)]
    assert third["processes"][0]["user"]
    assert last["processes"] == []

    found = snapshot(exp, *cards, **environment)  # the newest on this host, where others may run, too
    assert str(exp.path("run")) in (found["run"], *found["others"])
    assert found["ranks"] or found["run"] != str(exp.path("run"))  # another one may be about to begin, or to end
    text = ran(exp, *cards, "task=watch", "run=run", **environment).stdout
    assert "Acme X1" in text
    assert re.search(r"^\s*3 .* idle\b", text, re.MULTILINE)

    elsewhere = exp.path("elsewhere")  # the same folder, as another host sees it
    shutil.copytree(exp.path("run"), elsewhere)
    record, holder = (json.loads((elsewhere / name).read_text()) for name in ("env.json", ".lock"))
    record["devices"] = [{**device, "host": "node7"} for device in record["devices"]]
    (elsewhere / "env.json").write_text(json.dumps(record))
    (elsewhere / ".lock").write_text(json.dumps({**holder, "host": "node7", "machine": "another"}))
    away = snapshot(exp, *cards, "run=elsewhere", **environment)
    assert away["status"] == "running"
    assert [(rank["host"], rank["pid"], rank["stage"]) for rank in away["ranks"]] == [("node7", None, None)] * 2
    assert not any(each["rank"] is not None for card in away["cards"] for each in card["processes"])
    assert "node7" in ran(exp, *cards, "task=watch", "run=elsewhere", **environment).stdout

    process.send_signal(signal.SIGINT)
    process.communicate()
    ended = snapshot(exp, *cards, "run=run", **environment)
    assert (ended["status"], ended["ranks"]) == ("failed", [])
    assert "Interrupted" in ended["detail"]
    assert len(ended["cards"]) == 4


def test_on_a_terminal_the_table_is_drawn_again_and_ctrl_c_ends_only_the_watching(exp, start, python):
    process = start(*LONG, "nproc=2", "output_dir=run", "log_every=1")
    wait_for(has_steps(exp.path("run"), 1), process)
    terminal, inside = pty.openpty()
    fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    watching = subprocess.Popen(
        [*python, "backend=cpu", "task=watch", "run=run"], cwd=exp.folder, env=clean_environment(TERM="xterm"),
        stdin=inside, stdout=inside, stderr=inside, start_new_session=True,
    )  # fmt: skip
    os.close(inside)
    seen, deadline = "", time.monotonic() + 60
    while len(set(re.findall(r"step (\d+)", seen))) < 3:
        seen += os.read(terminal, 65536).decode()
        assert time.monotonic() < deadline, seen
    watching.send_signal(signal.SIGINT)
    while True:
        try:
            seen += os.read(terminal, 65536).decode()
        except OSError:  # its other end is closed
            break
    os.close(terminal)
    assert watching.wait(30) == 0, seen
    assert process.poll() is None
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen).replace("\r", "\n").splitlines()
    assert max(map(len, lines)) <= 80
    assert not any("interrupted" in line for line in lines)


def test_a_run_that_has_ended_is_shown_with_its_result(exp, trained):
    done = ran(exp, "backend=cpu", "task=watch", f"run={trained('forecast')}")
    result = json.loads((trained("forecast") / "result.json").read_text())
    assert "completed" in done.stdout
    assert f"{result['metric_name']} {result['metric']:.4f}" in done.stdout
    assert snapshot(exp, "backend=cpu", f"run={trained('forecast')}")["status"] == "completed"
    for wrong in (["run=nowhere"], [f"run={ROOT}"], ["run=[a,b]"], ["task.format=xml"]):
        assert wrong[0].partition("=")[0] in first_line(ran(exp, "task=watch", *wrong, code=2))
