"""A process that makes GPU memory for another one and sends its descriptors. Usage: vmm_child SOCKET_FD [simulated]

For drivers that refuse to import, into the process that made it, memory that a descriptor stands for. Each request is
a size, 8 bytes; each answer a byte with the descriptor. It ends with the socket.
"""

from __future__ import annotations

import functools
import os
import socket
import subprocess
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).resolve().parent.parent))

from support import cuda_driver


def make(size: int, simulated: bool) -> int:
    if not simulated:
        return cuda_driver.export(size)
    fd = os.memfd_create("test-kv")
    os.ftruncate(fd, size)
    return fd


@functools.cache
def _child(simulated: bool) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    ours, its = socket.socketpair()
    command = [sys.executable, __file__, str(its.fileno()), *["simulated"] * simulated]
    process = subprocess.Popen(command, pass_fds=[its.fileno()])
    its.close()
    return ours, process


def of_child(size: int, simulated: bool) -> int:
    """As make(), by a process that is started once."""
    ours, process = _child(simulated)
    ours.sendall(size.to_bytes(8, "little"))
    _, fds, _, _ = socket.recv_fds(ours, 1, 1)
    assert fds, f"the process that makes GPU memory ended with {process.wait(10)}"
    return fds[0]


def main() -> None:
    simulated = "simulated" in sys.argv
    with socket.socket(fileno=int(sys.argv[1])) as parent:
        while size := parent.recv(8):
            fd = make(int.from_bytes(size, "little"), simulated)
            socket.send_fds(parent, [b"\0"], [fd])
            os.close(fd)


if __name__ == "__main__":
    main()
