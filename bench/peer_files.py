"""LMCache's server with its tier in files: what is in the folder, and how its L1 forgets what is there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from peers import Peer
from support.daemon import wait_until

# With defaults, but for O_DIRECT in one. A third adapter, of slots in one file, needs a module that is not in the wheel.
FILES: dict[str, dict[str, Any]] = {"fs": {}, "fs_native": {"use_odirect": True}}


class PeerFiles:
    """`adapter`: one of FILES."""

    def __init__(self, python: str, adapter: str, folder: Path) -> None:
        self._folder = folder
        self.peer = Peer(python, {"type": adapter, "base_path": str(folder)} | FILES[adapter])

    def __enter__(self) -> PeerFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.peer.__exit__()

    def objects(self) -> int:
        return sum(1 for _ in self._files())

    def wait_for(self, objects: int) -> None:
        wait_until(lambda: self.objects() >= objects, 60, "the peer's objects are in files")
        assert self.objects() == objects

    def forget(self) -> None:
        """What is in L1, and only that. REQUIRES: all of it is in files."""

        def empty() -> bool:
            self.peer.clear()
            return not self.peer.status()["storage_manager"]["l1_manager"]["total_object_count"]

        wait_until(empty, 20, "the peer's L1 is empty")

    def drop_pages(self) -> None:
        """So that the next read is the disk's."""
        for path in self._files():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)

    def remove(self) -> None:
        """All files: the folder is not bounded."""
        for path in list(self._files()):
            os.unlink(path)

    def _files(self) -> Iterator[str]:
        """A file is renamed to this when it is whole."""
        return (entry.path for entry in os.scandir(self._folder) if entry.name.endswith(".data"))
