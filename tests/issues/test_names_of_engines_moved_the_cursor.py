"""`kvserver status` and `kvserver explain` wrote names of engines, models and requests as they were: what a client chose as its name
cleared the operator's screen, changed its colours or wrote another line over the table."""

from __future__ import annotations

import subprocess

from support.daemon import KVSERVER
from support.worker import make_keys

NAME = "a\x1b[2J\x1b[31mb\x07"


def test_status_and_explain_show_control_characters_of_names_as_text(make_daemon, make_worker):
    daemon = make_daemon()
    worker = make_worker(daemon, instance_id=NAME, model_name=f"m{NAME}")
    worker.lookup(make_keys(1), request_id=f"r{NAME}")
    worker.end_request(f"r{NAME}", prompt_tokens=100)
    for command in ("status", "explain"):
        words = [KVSERVER, command, "--http-port", str(daemon.http_port)]
        ended = subprocess.run(words, capture_output=True, text=True, timeout=30)
        assert (ended.returncode, ended.stderr) == (0, "")
        assert "a\\x1b[2J\\x1b[31mb\\x07" in ended.stdout, command
        assert not {"\x1b", "\x07"} & set(ended.stdout), command
