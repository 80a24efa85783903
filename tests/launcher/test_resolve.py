"""What a launcher cannot do."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from exp.config.resolve import to_plain
from exp.config.schema import ExpConfig, LauncherConfig
from exp.errors import ConfigError
from exp.launcher.base import create_launcher, launcher_class

TWO_NODES = {"nnodes": 2, "rdzv_endpoint": "127.0.0.1:1"}
WRONG = ("node0", ":1", "node0:port", "node0:65536", "no.such.host.invalid:29500")
LOCAL = {"_target_": "exp.launcher.local.LocalLauncher"}


@pytest.mark.parametrize(("settings", "key"), [
    ({**LOCAL, "max_restarts": 1}, "launcher.max_restarts"),
    ({**LOCAL, **TWO_NODES}, "launcher.nnodes"),
    ({"nnodes": 2}, "launcher.rdzv_endpoint"),
    *(({**TWO_NODES, "rdzv_endpoint": endpoint}, f"launcher.rdzv_endpoint={endpoint}") for endpoint in WRONG),
])  # fmt: skip
def test_what_a_launcher_cannot_do_is_refused_with_its_key(settings, key):
    config = OmegaConf.structured(ExpConfig(launcher=LauncherConfig(**{"_target_": "auto", **settings})))
    with pytest.raises(ConfigError, match=key):
        create_launcher(launcher_class(config), to_plain(config.launcher), nproc=1)
