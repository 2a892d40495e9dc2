"""A daemon that is, at SIGRTMIN, where a killed process is for a moment: the peers of its sockets have their end, but it is
not dead. What it was copying is not over; until it is killed it is stopped.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from pathlib import Path
from types import FrameType

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from support.daemon_main import main


def die(_number: int, _frame: FrameType | None) -> None:
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # no socket, or one without a peer
            connection = socket.socket(fileno=os.dup(int(fd)))
            if connection.type == socket.SOCK_SEQPACKET:
                connection.shutdown(socket.SHUT_RDWR)
    os.kill(os.getpid(), signal.SIGSTOP)


if __name__ == "__main__":
    signal.signal(signal.SIGRTMIN, die)
    sys.exit(main())
