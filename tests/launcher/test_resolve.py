"""Which launcher runs, whom its ranks are, and what the shell's variables do."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from exp.config.schema import LauncherConfig
from exp.errors import ConfigError
from exp.launcher import resolve
from exp.launcher.local import LocalLauncher
from exp.launcher.rank import RankInfo
from exp.launcher.shell_env import take_stale_variables
from exp.launcher.torchrun import TorchrunLauncher


def config(target="auto", **settings):
    return OmegaConf.structured(LauncherConfig(_target_=target, **settings))


@pytest.mark.parametrize(
    ("settings", "nproc", "kind"),
    [
        ({}, 1, LocalLauncher),
        ({}, 2, TorchrunLauncher),
        ({"max_restarts": 1}, 1, TorchrunLauncher),
        ({"nnodes": 2, "rdzv_endpoint": "127.0.0.1:1"}, 1, TorchrunLauncher),
        ({"target": "exp.launcher.torchrun.TorchrunLauncher"}, 1, TorchrunLauncher),
    ],
)
def test_auto_is_local_for_one_process_and_torchrun_for_more(settings, nproc, kind):
    launcher = resolve(config(**settings), nproc)
    assert type(launcher) is kind
    assert launcher.max_restarts == settings.get("max_restarts", 0)


@pytest.mark.parametrize(
    ("settings", "nproc", "key"),
    [
        ({"target": "exp.launcher.local.LocalLauncher"}, 2, "nproc"),
        ({"target": "exp.launcher.local.LocalLauncher", "max_restarts": 1}, 1, "launcher.max_restarts"),
        ({"target": "exp.launcher.local.LocalLauncher", "nnodes": 2, "rdzv_endpoint": "h:1"}, 1, "launcher.nnodes"),
        ({"nnodes": 2}, 1, "launcher.rdzv_endpoint"),
    ],
)
def test_what_a_launcher_cannot_do_is_refused_with_its_key(settings, nproc, key):
    with pytest.raises(ConfigError, match=key):
        resolve(config(**settings), nproc)


def test_stale_variables_are_taken_away_and_named():
    environ = {"RANK": "3", "WORLD_SIZE": "8", "TORCHELASTIC_RUN_ID": "x", "PATH": "/bin", "MASTER_PORT": "29500"}
    assert take_stale_variables(environ) == ["MASTER_PORT", "RANK", "TORCHELASTIC_RUN_ID", "WORLD_SIZE"]
    assert environ == {"PATH": "/bin"}
    assert take_stale_variables(environ) == []


def test_each_attempt_on_one_node_has_a_store_of_its_own():
    environ = {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "TORCHELASTIC_RESTART_COUNT": "1",
        "EXP_SCRATCH": "/scratch",
    }
    several = RankInfo.from_agent(environ)
    assert several == RankInfo(3, 1, 4, 2, node_rank=1, restart_count=1, single_node=False, store=None)
    one = RankInfo.from_agent({**environ, "GROUP_WORLD_SIZE": "1"})
    assert (one.single_node, one.store) == (True, "/scratch/store-1")
