"""Publishers here publish at once: no test of this folder has a subscriber that waits for the address."""

from __future__ import annotations

import pytest

from kvserver.kv_events import stream_sockets


@pytest.fixture(autouse=True)
def publish_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CONNECT_SECONDS", "MOST_CONNECT_SECONDS"):
        monkeypatch.setattr(stream_sockets, name, 0.0)
