"""Does this machine compute right, and together? doctor, env, parity and estimate; with faults planted."""

from __future__ import annotations

import json

import pytest

from tests.behaviour.conftest import STEADY

DOCTOR = ["task=doctor", "nproc=2", "task.burst_s=0.2", "task.timeout_s=45"]

SICK = """
import dataclasses, os, signal, time
from acme_backend import AcmeBackend
from exp.hardware.backend import Collectives

class Sums(Collectives):
    def all_reduce(self, tensor):
        super().all_reduce(tensor)
        if os.environ["SICK"] == "adds up wrong" and os.environ["RANK"] == "1":
            tensor.add_(1)

class Sick(AcmeBackend):
    collectives = Sums("gloo")
    capabilities = dataclasses.replace(AcmeBackend.capabilities, shared_device=False)
    rank = 0

    def worker_env(self, local_rank, *more, **options):
        self.rank = local_rank
        return super().worker_env(local_rank, *more, **options)

    def device_info(self, device):
        return {**super().device_info(device), "card": 0 if os.environ["SICK"] == "shares" else self.rank}

    def set_device(self, local_rank):
        if os.environ["SICK"] == "dies" and local_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().set_device(local_rank)

    def synchronize(self):
        if os.environ["SICK"] == "hangs" and self.rank == 1:
            time.sleep(300)
"""


def failures(run) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for finding in json.loads((run / "doctor.json").read_text())["findings"]:
        if finding["status"] == "failed":
            found.setdefault(finding["check"], []).extend(finding["ranks"])
    return found


@pytest.mark.legacy
def test_the_doctor_of_two_healthy_ranks_says_ok(exp):
    done = exp(*DOCTOR, "backend=cpu", "output_dir=run")
    assert done.returncode == 0, done.stdout
    assert done.stderr == ""
    report = json.loads((exp.path("run") / "doctor.json").read_text())
    assert report["verdict"] == "ok"
    assert [{check["status"] for check in rank["checks"]} for rank in report["ranks"]] == [{"ok"}, {"ok"}]
    assert exp.result("run")["status"] == "completed"


@pytest.mark.parametrize(("sick", "found"), [
    ("adds up wrong", {"all_reduce": [1]}),
    pytest.param("shares", {"cards": [0, 1]}, marks=pytest.mark.extended),
    pytest.param("dies", {"device": [1]}, marks=pytest.mark.extended),
    pytest.param("hangs", {"all_reduce": [1]}, marks=pytest.mark.extended),
])  # fmt: skip
def test_the_doctor_names_what_is_ill_and_whose_it_is(exp, page, sick, found):
    page("add-a-backend", python=["acme_backend.py", "my_vendors.py"], yaml=["my_conf/backend/acme.yaml"])
    (exp.folder / "sick.py").write_text(SICK)
    (exp.folder / "my_conf" / "backend" / "sick.yaml").write_text("_target_: sick.Sick\nname: sick\n")
    missing = ["data.root=/nowhere"] if sick == "shares" else []
    done = exp("--config-dir", "my_conf", *DOCTOR, "backend=sick", *missing, "output_dir=run", SICK=sick)
    assert done.returncode == 1, done.stdout
    wrong = failures(exp.path("run"))
    if sick == "shares":
        assert sorted(set(wrong.pop("data"))) == [0, 1]
    assert {check: sorted(set(ranks)) for check, ranks in wrong.items() if check in found} == found, done.stdout
    assert exp.result("run")["status"] == "failed"


def test_facts_for_a_bug_report_hold_no_secret(exp):
    done = exp("task=env", "backend=gcu", "output_dir=env", AWS_SECRET_ACCESS_KEY="hush", TORCH_LOGS="+dynamo")
    assert done.returncode == 0, done.stderr  # a backend that is not there is what the report is about
    assert "TORCH_LOGS=+dynamo" in done.stdout
    assert "hush" not in done.stdout + (exp.path("env") / "env.json").read_text()


@pytest.mark.extended
@pytest.mark.parametrize(("method", "named"), [
    ("def set_device(self, local_rank):\n        import torch\n"
     "        def blur(module, inputs, output):\n"
     "            return output.bfloat16().float() if isinstance(module, torch.nn.LayerNorm) else None\n"
     "        torch.nn.modules.module.register_module_forward_hook(blur)\n"
     "        return super().set_device(local_rank)\n", "attn_layers.0.norm1"),
])  # fmt: skip
def test_parity_finds_a_card_that_computes_otherwise(exp, page, method, named):
    page("add-a-backend", python=["acme_backend.py", "my_vendors.py"], yaml=["my_conf/backend/acme.yaml"])
    (exp.folder / "broken.py").write_text(
        f"from acme_backend import AcmeBackend\n\n\nclass Broken(AcmeBackend):\n    {method}"
    )
    words = [word for word in STEADY if word != "backend=cpu"]
    done = exp("--config-dir", "my_conf", *words, "backend=acme", "backend._target_=broken.Broken", "task=parity",
               "reference=cpu", "steps=2", "output_dir=run")  # fmt: skip
    assert done.returncode == 1, done.stdout
    assert named in done.stdout + done.stderr
    assert json.loads((exp.path("run") / "parity.json").read_text())["agrees"] is False
