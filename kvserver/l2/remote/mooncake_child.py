"""Process in which a client of Mooncake Store runs: one for each lane, which starts and ends it.

The library does not run in the daemon's process:
- its setup() keeps the GIL until the master answers, 43 s where one hangs;
- its calls have no deadline, and a call that hangs here is killed;
- it has 27 threads;
- every peer of the network may read and write the memory that it registers.

The process serves one request at a time, with one reply: a length of 4 bytes and JSON. The lane's buffer arrives as the
descriptor of a memory file. It is run as a file, with nothing of kvserver loaded.

Owns: the library's store object, the memory that is registered with it, and which of its calls serves which request. Refuses to
know: what a code of the library means for a tier.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

LENGTH_BYTES = 4
RECEIVE_BYTES = 1 << 16  # of one call: nearly every message is one, and wakes its receiver once
TOO_LARGE = "too large"  # in the place of a code: a value that does not fit
_PR_SET_PDEATHSIG = 1
_ID_BYTES = 64  # more than an id has
_MOST_IDS = 512
_NOT_FOUND, _BAD_PARAMETERS = -704, -600


class RegisteredMemory:
    """Memory that is registered with the store."""

    def __init__(self, store: Any, descriptor: int, size: int) -> None:
        self._store, self.bytes = store, size
        self.map = mmap.mmap(descriptor, size)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        if code := store.register_buffer(self.address, size):
            raise OSError(f"a buffer could not be registered: {code}")

    def free(self) -> None:
        self._store.unregister_buffer(self.address)


class LibraryStore:
    def __init__(self, settings: dict[str, Any]) -> None:
        from mooncake.store import MooncakeDistributedStore, ReplicateConfig

        self._store = MooncakeDistributedStore()
        self._ids_config = ReplicateConfig()
        self._ids_config.replica_num = 2  # where there are two owners of memory
        self._ids_config.with_hard_pin = True
        master = (settings["host"], settings["port"])
        self.code: int = self._store.setup(
            {
                "local_hostname": _address_towards(master),
                "metadata_server": settings["metadata"],
                "global_segment_size": "0",
                "local_buffer_size": "0",
                "protocol": settings["protocol"],
                "rdma_devices": settings["devices"],
                "master_server_addr": f"{settings['host']}:{settings['port']}",
            }
        )
        self._buffer: RegisteredMemory | None = None
        self._ids = RegisteredMemory(self._store, -1, _MOST_IDS * _ID_BYTES) if not self.code else None

    def map(self, descriptor: int, size: int) -> int:
        if self._buffer is not None:
            self._buffer.free()
        self._buffer = RegisteredMemory(self._store, descriptor, size)
        os.close(descriptor)
        return 0

    def get(self, names: list[str], offsets: list[int], sizes: list[int]) -> list[int | str]:
        """Bytes of each value, or the library's code."""
        assert self._buffer is not None
        places = [self._buffer.address + offset for offset in offsets]
        found: list[int | str] = list(self._store.batch_get_into(names, places, sizes))
        for at, code in enumerate(found):
            if code == _BAD_PARAMETERS and self._store.get_size(names[at]) > sizes[at]:
                found[at] = TOO_LARGE
        return found

    def put(self, names: list[str], offsets: list[int], sizes: list[int]) -> list[int]:
        """0 also where there is a value of the name, which stays."""
        assert self._buffer is not None
        return list(self._store.batch_put_from(names, [self._buffer.address + offset for offset in offsets], sizes))

    def exist(self, names: list[str]) -> list[int]:
        return list(self._store.batch_is_exist(names))

    def remove(self, names: list[str]) -> list[int]:
        return list(self._store.batch_remove(names, True))  # those with a lease, too

    def read_ids(self, names: list[str]) -> list[str | int | None]:
        """Value of each id in hexadecimal, None, or the library's code."""
        assert self._ids is not None
        places = [at * _ID_BYTES for at in range(len(names))]
        codes = self._store.batch_get_into(
            names, [self._ids.address + place for place in places], [_ID_BYTES] * len(names)
        )
        return [
            self._ids.map[place : place + code].hex() if code >= 0 else None if code == _NOT_FOUND else code
            for place, code in zip(places, codes, strict=True)
        ]

    def create_id(self, name: str, value: str) -> int:
        """A value that is there stays."""
        return self._write(self._store.batch_put_from, name, value)

    def write_id(self, name: str, value: str) -> int:
        return self._write(self._store.batch_upsert_from, name, value)

    def _write(self, call: Callable[..., list[int]], name: str, value: str) -> int:
        assert self._ids is not None
        raw = bytes.fromhex(value)
        self._ids.map[: len(raw)] = raw
        (code,) = call([name], [self._ids.address], [len(raw)], self._ids_config)
        return code


def _address_towards(master: tuple[str, int]) -> str:
    """Address of this machine as the master sees it. A client's own name must differ from those of other machines."""
    family, kind, protocol, _, address = socket.getaddrinfo(*master, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def packed(message: object) -> bytes:
    raw = json.dumps(message).encode()
    return len(raw).to_bytes(LENGTH_BYTES, "big") + raw


def missing_bytes(received: bytes) -> int:
    """Number of bytes that the message lacks, as far as it is known. No other message follows it before its reply."""
    if len(received) < LENGTH_BYTES:
        return LENGTH_BYTES - len(received)
    return LENGTH_BYTES + int.from_bytes(received[:LENGTH_BYTES], "big") - len(received)


def _receive(connection: socket.socket) -> tuple[Any, int]:
    """A request, and the descriptor that arrived with it, or -1. EOFError after the other side has ended."""
    raw, descriptor = b"", -1
    while (missing := missing_bytes(raw)) > 0:
        part, descriptors, _, _ = socket.recv_fds(connection, max(missing, RECEIVE_BYTES), 1)
        if not part:
            raise EOFError
        raw, descriptor = raw + part, descriptors[0] if descriptors else descriptor
    return json.loads(raw[LENGTH_BYTES:]), descriptor


def serve(connection: socket.socket) -> None:
    """Answer requests until the other side ends. The first message has the settings: they may have a password."""
    client = LibraryStore(_receive(connection)[0])
    connection.sendall(packed(client.code))
    while True:
        request, descriptor = _receive(connection)
        call = getattr(client, request.pop("call"))
        connection.sendall(packed(call(descriptor, **request) if descriptor >= 0 else call(**request)))


def main() -> None:
    """Arguments: sys.path, and a connected socket's descriptor, both in JSON; without the latter: load the library only."""
    sys.path[:] = json.loads(sys.argv[1])
    if len(sys.argv) == 2:
        import mooncake.store  # noqa: F401

        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        with socket.socket(fileno=json.loads(sys.argv[2])) as connection:
            serve(connection)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(0)  # the library's threads need no end


if __name__ == "__main__":
    main()
