"""Client of a Mooncake Store: `mooncake-transfer-engine-non-cuda`, each in a process of its own (`mooncake_child`).

A request that has no answer in time ends the process, so that nothing writes to the lane's buffer afterwards. The next request
starts another one. Objects are immutable, and may be evicted at any time. Ids of generations are pinned, and replaced as a whole.

Owns: the form of URLs of this kind, that process, and the meaning of the library's codes.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kvserver.config import TierUrl
from kvserver.l2.remote.buffer import LaneBuffer
from kvserver.l2.remote.mooncake_child import LENGTH_BYTES, RECEIVE_BYTES, TOO_LARGE, missing_bytes, packed
from kvserver.l2.remote.store import StoreClient, StoreError, StoreFull, StoreTimeout
from kvserver.protocol import ConfigError

_PORT = 50051
_MOST_VALUE_BYTES = 512 << 20
_MOST_QUESTIONS = 512
_CHILD = str(Path(__file__).with_name("mooncake_child.py"))
_LOAD_SECONDS = 60.0
_START_SECONDS = 10.0  # of a process, on a busy machine; the library's own requests end before
# Codes of the library.
_NO_SPACE = -200
_ABSENT = {-703, -704, -712}  # being written, not there, evicted
_KEPT = -705  # there is one already
_BUSY = {-703, -706, -708, -714}  # in use: try again
_LEASE_EXPIRED = -707  # the memory was reserved for a shorter time than the read needed
_TRANSFER_FAILED = -800  # the owner of the memory is not there; the master notices after 10 s
_UNREAD = {_LEASE_EXPIRED, _TRANSFER_FAILED}
_TIMEOUT = -901
_MEANING = {
    -1: "the master does not answer",
    _NO_SPACE: "the store has no memory for it: a mooncake_client gives it some",
    _LEASE_EXPIRED: "a read needed more time than its lease has",
    _TRANSFER_FAILED: "an owner of memory does not answer",
    -900: "the master does not answer",
    _TIMEOUT: "the master does not answer in time",
}
_RETRY_SECONDS = 0.02


class MooncakeUrl:
    """Parts of a URL of this kind. Raises ConfigError if the URL is invalid."""

    def __init__(self, url: TierUrl) -> None:
        self.prefix = url.path.strip("/") or "kvserver"
        self.timeout_seconds, self.seconds_for = url.timeout_seconds, url.seconds_for
        if url.username or url.password:
            raise ConfigError(f"--l2 {url.shown}: Mooncake has no users: write mooncake://host:port/prefix")
        self.settings = {
            "host": url.host,
            "port": url.port or _PORT,
            "protocol": url.own.get("protocol", "tcp"),
            "devices": url.own.get("devices", ""),
            "metadata": url.own.get("metadata", "P2PHANDSHAKE"),
        }

    def environment(self, size: int) -> dict[str, str]:
        """Variables that the library reads: limits of its waits, and silence. `size`: bytes of the largest request."""
        milliseconds = str(max(1, int(self.timeout_seconds * 1000)))
        return {
            "MC_RPC_TIMEOUT_MS": milliseconds,
            "MC_RPC_CONNECT_TIMEOUT_MS": milliseconds,
            "MC_TCP_STATUS_TIMEOUT_SEC": str(math.ceil(self.seconds_for(size))),
            "MC_STORE_CLIENT_SETUP_RETRIES": "1",
            "MC_STORE_MEMCPY": "0",  # it copies inside one process, which has nothing to read from itself
        }


def require_client(url: TierUrl) -> None:
    """ConfigError, with the command to type, unless the client's library is there and loads."""
    command = [sys.executable, "-I", _CHILD, json.dumps(sys.path)]
    found = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_LOAD_SECONDS)
    if not found.returncode:
        return
    *_, why = found.stderr.strip().splitlines() or ["it does not load"]
    if "No module named" in why:
        raise ConfigError(f"--l2 {url.shown} needs a client of Mooncake: pip install mooncake-transfer-engine-non-cuda")
    raise ConfigError(
        f"--l2 {url.shown}: the client of Mooncake does not load ({why}); it needs libraries of the system:"
        " apt-get install libibverbs1 libnuma1 libcurl4"
    )


def connect(url: MooncakeUrl, buffer: LaneBuffer) -> StoreClient:
    """StoreError if the store does not answer."""
    client = _MooncakeClient(url, buffer)
    client.start()
    return client


class _MooncakeClient:
    most_value_bytes = _MOST_VALUE_BYTES
    most_questions, asks_apart = _MOST_QUESTIONS, False

    def __init__(self, url: MooncakeUrl, buffer: LaneBuffer) -> None:
        self._url, self._buffer = url, buffer
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._mapped = 0  # the growth of the buffer that the process has

    def start(self) -> None:
        deadline = time.monotonic() + self._url.timeout_seconds + _START_SECONDS
        ours, theirs = socket.socketpair()
        with theirs:
            self._socket, self._mapped = ours, 0
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", _CHILD, json.dumps(sys.path), str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    env={**os.environ, **self._url.environment(self._buffer.covers)},
                    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                )  # fmt: skip
            except OSError as error:
                self.close()
                raise StoreError(f"the client of Mooncake did not start: {error.strerror}") from None
        self._send(self._url.settings, deadline)  # not on the command line, which any user may read
        if code := self._receive(deadline):
            self.close()
            raise _error(code)

    def get(self, names: Sequence[str], buffers: Sequence[memoryview]) -> list[memoryview | StoreError | None]:
        codes = self._ask("get", names=names, **self._places(buffers))
        unread = [code for code in codes if code in _UNREAD]
        if unread and all(code in _UNREAD or code in _ABSENT for code in codes):
            raise _error(unread[0])
        found: list[memoryview | StoreError | None] = []
        for code, buffer in zip(codes, buffers, strict=True):
            if code == TOO_LARGE:
                found.append(buffer[:0])
            elif code in _ABSENT or code in _UNREAD:  # as of one of several owners
                found.append(None)
            else:
                found.append(buffer[:code] if code >= 0 else _error(code))
        return found

    def put(self, names: Sequence[str], values: Sequence[memoryview]) -> list[StoreError | None]:
        codes = self._ask("put", names=names, **self._places(values))
        return [_error(code) if code and code != _KEPT else None for code in codes]

    def exist(self, names: Sequence[str]) -> list[bool | StoreError]:
        return [code > 0 if code >= 0 else _error(code) for code in self._ask("exist", names=names)]

    def delete(self, names: Sequence[str]) -> None:
        for code in self._ask("remove", names=names):
            if code not in _ABSENT and code not in _BUSY:
                _no_error(code)

    def refresh(self, names: Sequence[str]) -> None:
        """A question is a use."""
        self.exist(names)

    def read_ids(self, names: Sequence[str]) -> list[bytes | None]:
        """Waits for one that another daemon is writing."""
        deadline = time.monotonic() + self._url.timeout_seconds
        while not _BUSY.isdisjoint(found := self._ask("read_ids", names=names)) and time.monotonic() < deadline:
            time.sleep(_RETRY_SECONDS)
        return [None if value is None else bytes.fromhex(_no_code(value)) for value in found]

    def create_id(self, name: str, value: bytes) -> bytes:
        self._retry("create_id", name, value)
        (present,) = self.read_ids([name])
        if present is None:
            raise StoreError("an id is missing as soon as it was written")
        return present

    def write_id(self, name: str, value: bytes) -> str:
        self._retry("write_id", name, value)
        return ""

    def close(self) -> None:
        """End the process. Nothing writes to the buffer afterwards."""
        if self._socket is not None:
            self._socket.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._socket = self._process = None

    # ---- requests -----------------------------------------------------------------------------------

    def _retry(self, call: str, name: str, value: bytes) -> None:
        """Write an id that another daemon may be writing."""
        deadline = time.monotonic() + self._url.timeout_seconds
        while (code := self._ask(call, name=name, value=value.hex())) in _BUSY and time.monotonic() < deadline:
            time.sleep(_RETRY_SECONDS)
        if code and code != _KEPT:
            raise _error(code)

    def _places(self, views: Sequence[memoryview]) -> dict[str, list[int]]:
        return {"offsets": [self._buffer.offset_of(view) for view in views], "sizes": [len(view) for view in views]}

    def _ask(self, call: str, **arguments: Any) -> Any:
        """The process's reply. StoreTimeout, StoreError: there is none, and the process has ended."""
        if self._socket is None:
            self.start()
        deadline = time.monotonic() + self._url.seconds_for(sum(arguments.get("sizes", ())))
        if "offsets" in arguments and self._mapped != self._buffer.growths:
            self._send({"call": "map", "size": self._buffer.bytes}, deadline, [self._buffer.fd])
            self._receive(deadline)
            self._mapped = self._buffer.growths
        self._send({"call": call, **arguments}, deadline)
        return self._receive(deadline)

    def _send(self, message: dict[str, Any], deadline: float, descriptors: Sequence[int] = ()) -> None:
        raw = packed(message)
        with self._or_end(deadline) as connection:
            sent = socket.send_fds(connection, [raw], descriptors)
            connection.sendall(raw[sent:])

    def _receive(self, deadline: float) -> Any:
        raw = b""
        with self._or_end(deadline) as connection:
            while (missing := missing_bytes(raw)) > 0:
                connection.settimeout(max(0.001, deadline - time.monotonic()))
                part = connection.recv(max(missing, RECEIVE_BYTES))
                if not part:
                    raise ConnectionResetError
                raw += part
        return json.loads(raw[LENGTH_BYTES:])

    @contextlib.contextmanager
    def _or_end(self, deadline: float) -> Iterator[socket.socket]:
        """The connection. The process ends with a request that fails: it may still be writing to the buffer."""
        assert self._socket is not None
        try:
            self._socket.settimeout(max(0.001, deadline - time.monotonic()))
            yield self._socket
        except TimeoutError:
            self.close()
            raise StoreTimeout("the store does not answer in time") from None
        except OSError:
            self.close()
            raise StoreError("the client of Mooncake has ended") from None


def _error(code: int) -> StoreError:
    kind = {_TIMEOUT: StoreTimeout, _NO_SPACE: StoreFull}.get(code, StoreError)
    return kind(_MEANING.get(code, f"Mooncake's error {code}"))


def _no_error(code: int) -> int:
    if code < 0:
        raise _error(code)
    return code


def _no_code(value: str | int) -> str:
    if isinstance(value, int):
        raise _error(value)
    return value
