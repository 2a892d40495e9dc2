"""`serve` and `doctor` used KVSERVER_HTTP_PORT, `status` and `explain` asked port 8080: in a container with another port they found no daemon."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable

import pytest
from support.daemon import KVSERVER, Daemon


@pytest.mark.parametrize("command", ["status", "explain"])
def test_commands_ask_the_port_that_the_environment_gives_the_daemon(
    make_daemon: Callable[..., Daemon], command: str
) -> None:
    environment = {**os.environ, "KVSERVER_HTTP_PORT": str(make_daemon().http_port)}
    done = subprocess.run([KVSERVER, command, "--json"], capture_output=True, text=True, timeout=20, env=environment)
    assert done.returncode == 0, done.stderr
