"""A store that daemons share, in a process of its own: for tests that run where its client is not installed."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from support.daemon import KVSERVER


@contextlib.contextmanager
def store_url(kind: str, prefix: str) -> Iterator[str]:
    """URL of a tier in a new store, "valkey" or "mooncake". The daemon's Python runs it."""
    command = [str(Path(KVSERVER).parent / "python"), "-m", "support.store_process", kind, prefix]
    with subprocess.Popen(
        command, cwd=Path(__file__).parents[1], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert url, "the store has not started"
        try:
            yield url
        finally:
            process.stdin.close()
            process.wait(30)


def main() -> None:
    from support.mooncake import MooncakeStore
    from support.valkey import ValkeyStore

    kind, prefix = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        store = {"valkey": ValkeyStore, "mooncake": MooncakeStore}[kind](Path(folder))
        print(store.url_of(prefix), flush=True)
        sys.stdin.read()
        store.close()


if __name__ == "__main__":
    main()
