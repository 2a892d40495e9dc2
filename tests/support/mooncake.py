"""A real Mooncake Store for a test: a master and owners of memory, on ports that they keep while they are down; what they had is then lost."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import urllib.request
from pathlib import Path

import mooncake

from kvserver.config import parse_tiers
from kvserver.l2.remote.buffer import LaneBuffer
from kvserver.l2.remote.mooncake import MooncakeUrl, connect
from kvserver.l2.remote.store import StoreClient
from support.ports import reserved_port

_START_SECONDS = 60.0
BINARIES = Path(mooncake.__file__).parent
_MOST_BYTES = 8 << 20  # of an object that a test reads


class MooncakeStore:
    """`memory`: of each owner. Objects that were used are not evicted for `lease_ms`."""

    def __init__(self, folder: Path, owners: int = 1, memory: str = "256MB", lease_ms: int = 5000) -> None:
        self._folder, self._memory, self._lease_ms = folder, memory, lease_ms
        found = [reserved_port() for _ in range(2 + owners)]
        self._reservations = [reservation for reservation, _ in found]
        self.port, self._http_port, *self._owner_ports = [port for _, port in found]
        self._master: subprocess.Popen[bytes] | None = None
        self.owners: list[subprocess.Popen[bytes]] = []
        self._client: tuple[StoreClient, LaneBuffer] | None = None
        self.start()

    def url_of(self, prefix: str, *parameters: str) -> str:
        return f"mooncake://127.0.0.1:{self.port}/{prefix}?" + "&".join(parameters)

    def start(self) -> None:
        self.start_master()
        self.owners = [self._own(port) for port in self._owner_ports]
        deadline = time.monotonic() + _START_SECONDS
        while not self._serves():
            assert self._master is not None
            assert self._master.poll() is None, "the master has ended"
            assert time.monotonic() < deadline, "the store does not start"
            time.sleep(0.05)

    def start_master(self) -> None:
        self._master = self._run(
            "mooncake_master",
            rpc_address="127.0.0.1", rpc_port=self.port, metrics_host="127.0.0.1", metrics_port=self._http_port,
            default_kv_lease_ttl=self._lease_ms,
        )  # fmt: skip

    def kill_master(self) -> None:
        assert self._master is not None
        self._master.kill()
        self._master.wait()

    def add_owner(self) -> None:
        reservation, port = reserved_port()
        self._reservations.append(reservation)
        self._owner_ports.append(port)
        self.owners.append(self._own(port))

    def names(self) -> list[str]:
        return self._get("get_all_keys").split()

    def objects(self) -> list[str]:
        """Names of records."""
        return sorted(name for name in self.names() if "/generations/" not in name)

    def read(self, where: str) -> bytes:
        client, buffer = self._connection()
        (found,) = client.get([where], buffer.views([_MOST_BYTES]))
        assert found is not None
        return bytes(found)

    def write(self, where: str, value: bytes) -> None:
        """No value is empty here: one byte in its place."""
        client, buffer = self._connection()
        client.delete([where])
        (view,) = buffer.views([len(value) or 1])
        view[:] = value or b"\0"
        assert client.put([where], [view]) == [None]

    def remove(self, where: str) -> None:
        self._connection()[0].delete([where])

    def stop(self) -> None:
        """It answers nothing, and keeps its connections, until go_on()."""
        self._signal(signal.SIGSTOP)
        for process in self._processes():
            os.waitid(os.P_PID, process.pid, os.WSTOPPED)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        if self._client is not None:
            self._client[0].close()
            self._client = None
        for process in self._processes():
            process.kill()
            process.wait()
        self._master, self.owners = None, []

    def close(self) -> None:
        self.kill()
        for reservation in self._reservations:
            reservation.close()

    def _run(self, program: str, **flags: object) -> subprocess.Popen[bytes]:
        command = [str(BINARIES / program), *(f"-{name}={value}" for name, value in flags.items())]
        with (self._folder / f"{program}.log").open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, cwd=self._folder)

    def _own(self, port: int) -> subprocess.Popen[bytes]:
        return self._run(
            "mooncake_client",
            master_server_address=f"127.0.0.1:{self.port}", metadata_server="P2PHANDSHAKE",
            host="127.0.0.1", port=port, global_segment_size=self._memory,
        )  # fmt: skip

    def _serves(self) -> bool:
        """The master answers, and has the memory of all owners."""
        try:
            return len(self._get("get_all_segments").split()) >= len(self._owner_ports)
        except OSError:
            return False

    def _get(self, page: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._http_port}/{page}", timeout=5) as reply:
            text: str = reply.read().decode()
            return text

    def _connection(self) -> tuple[StoreClient, LaneBuffer]:
        if self._client is None:
            buffer = LaneBuffer()
            (url,) = parse_tiers([self.url_of("test", "timeout=20s")])
            self._client = connect(MooncakeUrl(url), buffer), buffer
        return self._client

    def _processes(self) -> list[subprocess.Popen[bytes]]:
        return [process for process in (self._master, *self.owners) if process is not None]

    def _signal(self, number: int) -> None:
        assert self._master is not None
        for process in self._processes():
            os.kill(process.pid, number)
