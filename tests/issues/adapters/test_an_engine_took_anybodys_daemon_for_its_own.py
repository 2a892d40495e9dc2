"""An engine with the default endpoint under /tmp took any process that answered there for its daemon, and handed its KV memory to it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable

import pytest
from support.daemon import Daemon, wait_until

from kvserver.adapters.common.link import Link
from kvserver.protocol import default_endpoint


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_an_engine_does_not_talk_to_a_daemon_in_another_users_folder(
    make_daemon: Callable[..., Daemon], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    impostor = make_daemon()  # which holds a socket at the default endpoint
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(impostor.folder))
    folder = impostor.folder / "kvserver"
    folder.mkdir(mode=0o700)
    (folder / "kvserver.sock").symlink_to(impostor.sockets[0])
    os.chown(folder, 65534, 65534)
    link = Link(default_endpoint(), "test")
    try:
        link.start(5.0)
        assert link.session is None
        assert "belongs to user 65534" in caplog.text
        os.chown(folder, 0, 0)
        wait_until(lambda: link.session is not None, what="the same folder, of our own user")
    finally:
        link.stop(5.0)
        shutil.rmtree(folder)
