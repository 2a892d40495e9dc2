"""`--record` and `--kv-events-file` with a named pipe that no process read: the start waited for a reader, without a word. So did SIGHUP, in the
thread that writes.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.daemon import Daemon
from support.kept_l1 import refusal

from kvserver.events import AppendedFile


@pytest.mark.parametrize("flag", ["record", "kv_events_file"])
def test_a_pipe_without_a_reader_is_refused(tmp_path: Path, flag: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    daemon = Daemon(**{flag: tmp_path / "pipe"})
    try:
        assert refusal(daemon).endswith(f"--{flag.replace('_', '-')} {tmp_path}/pipe: No such device or address")
    finally:
        daemon.close()


def test_a_pipe_with_a_reader_is_written(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    read = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    file = AppendedFile(str(tmp_path / "pipe"))
    try:
        file.write(b"a line\n")
        file.flush()
        assert os.read(read, 100) == b"a line\n"
    finally:
        file.close()
        os.close(read)
