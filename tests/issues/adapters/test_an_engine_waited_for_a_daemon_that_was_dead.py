"""A daemon that was killed leaves its socket file, and for it the link took a dead daemon for one that is slow: each attempt to
connect waited 2 seconds, and an engine that ended meanwhile waited a second for the attempt.
"""

from __future__ import annotations

from collections.abc import Callable

from support.daemon import Daemon

from kvserver.adapters.common.link import Link


def test_a_socket_that_no_process_listens_at_ends_the_attempt_to_connect(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon()
    daemon.kill()
    assert daemon.sockets[0].exists()
    link = Link(daemon.endpoint, "test")
    link.start(wait_seconds=1.0)
    assert link.cache_status.reason == "no_daemon"
    assert link.stop()
