"""As many cores as the scheduler's mask and the control groups of a machine of 16 leave."""

from __future__ import annotations

import os

import pytest
from exp.backends.cpu import CpuBackend

from exp.hardware import backend as cores


@pytest.mark.parametrize(
    ("own", "files", "left"),
    [
        ("0::/slice/job\n", {"slice/cpu.max": "650000 100000\n", "slice/job/cpu.max": "max 100000\n"}, 6),
        ("0::/of/the/host\n", {"cpu.max": "400000 100000\n"}, 4),  # seen from within a container
        ("4:memory:/a\n3:cpu,cpuacct:/a\n", {"cpu,cpuacct/a/cpu.cfs_quota_us": "800000\n",
                                            "cpu,cpuacct/a/cpu.cfs_period_us": "100000\n"}, 8),
        ("3:cpu:/a\n", {"cpu/a/cpu.cfs_quota_us": "-1\n", "cpu/a/cpu.cfs_period_us": "100000\n"}, 16),
    ],
)  # fmt: skip
def test_quotas_count(tmp_path, monkeypatch, own, files, left):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(16)))
    monkeypatch.setattr(cores, "_CGROUPS", tmp_path)
    monkeypatch.setattr(cores, "_PROCESS_CGROUPS", tmp_path / "own")
    for name, content in {**files, "own": own}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    assert cores.usable_cores() == left
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    environments = [CpuBackend(name="cpu").worker_env(0, ranks, True) for ranks in (1, 3, 99)]
    assert [each["OMP_NUM_THREADS"] for each in environments] == [str(left), str(left // 3), "1"]
    assert environments[0]["TORCH_DEVICE_BACKEND_AUTOLOAD"] == "0"
