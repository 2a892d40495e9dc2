"""A store that daemons share, in a process of its own: for tests that run where its client is not installed."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from support.daemon import KVSERVER

S3_CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "test-key",
    "AWS_SECRET_ACCESS_KEY": "test-s3-secret",
    "AWS_REGION": "us-east-1",
}


class StoreProcess:
    """A running store; `url` is that of a tier in it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.url = self._answer()

    def do(self, act: str) -> None:
        """Let the store "stop", "go_on", "kill" itself or "start" again."""
        assert self._process.stdin is not None
        self._process.stdin.write(act + "\n")
        self._process.stdin.flush()
        assert self._answer() == act

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        assert line, "the store's process has ended"
        return line


@contextlib.contextmanager
def store_process(kind: str, prefix: str) -> Iterator[StoreProcess]:
    """A new store, "valkey", "mooncake" or "s3". The daemon's Python runs it. Daemons inherit the credentials that it needs."""
    command = [str(Path(KVSERVER).parent / "python"), "-m", "support.store_process", kind, prefix]
    with (
        mock.patch.dict(os.environ, S3_CREDENTIALS if kind == "s3" else {}),
        subprocess.Popen(
            command, cwd=Path(__file__).parents[1], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process,
    ):
        assert process.stdin is not None
        try:
            yield StoreProcess(process)
        finally:
            process.stdin.close()
            process.wait(30)


def _started(kind: str, folder: Path) -> Any:
    if kind == "valkey":
        from support.valkey import ValkeyStore

        return ValkeyStore(folder)
    if kind == "mooncake":
        from support.mooncake import MooncakeStore

        return MooncakeStore(folder)
    from support.s3 import S3Server

    return S3Server()


def main() -> None:
    kind, prefix = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        store = _started(kind, Path(folder))
        print(store.url_of(prefix), flush=True)
        for line in sys.stdin:
            getattr(store, line.strip())()
            print(line.strip(), flush=True)
        store.close()


if __name__ == "__main__":
    main()
