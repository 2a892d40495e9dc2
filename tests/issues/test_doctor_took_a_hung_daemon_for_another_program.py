"""`kvserver doctor` reported the HTTP port of a daemon that hung as used by another program, and advised another port."""

from __future__ import annotations

from support.commands import run
from support.doctor import flags, rows


def test_a_stopped_daemon_is_named_with_its_process_and_what_wakes_it(make_daemon):
    daemon = make_daemon()
    daemon.freeze()
    try:
        code, found = rows(*flags(daemon))
        status = run("status", "--http-port", str(daemon.http_port))
    finally:
        daemon.thaw()
    assert code == 1
    for check in ("daemon", "HTTP port"):
        assert found[check]["level"] == "problem"
        assert f"does not answer: process {daemon.pid} is stopped" in found[check]["text"], found[check]
        assert found[check]["fix"] == f"kill -CONT {daemon.pid}"
    assert status.returncode == 1
    assert "does not answer within 5 s; see kvserver doctor" in status.stderr
