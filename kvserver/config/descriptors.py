"""Descriptors of this process: how many are left, and for which connections the last ones are kept.

A process without free descriptors cannot accept a connection, and libzmq ends the process that cannot. So the daemon refuses by
itself while some are left: attaching workers and status pages below RESERVE, all other connections below FOR_ENGINES.

Owns: these bounds. Refuses to know: who opens descriptors.
"""

from __future__ import annotations

import fcntl
import os
import resource

from kvserver.protocol import ConfigError

FOR_ENGINES = 16  # kept when a connection is accepted: for accepts under way in other threads, files and storage
RESERVE = 32  # kept when a worker attaches, or a status page is served
LEAST = 128  # for a daemon to start: it opens about 25, and keeps RESERVE
HINT = (
    "raise the daemon's limit of open files "
    "(ulimit -Hn 65536; systemd: LimitNOFILE=65536; docker: --ulimit nofile=65536:65536)"
)
SHORT = f"too few descriptors are free; {HINT}"


def raise_descriptor_limit() -> None:
    """Raise the soft limit to the hard one: a worker brings up to 251 descriptors. ConfigError if that is too low."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < LEAST:
        raise ConfigError(f"the daemon may open {most} files and needs at least {LEAST}; {HINT}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def has_free_descriptors(wanted: int) -> bool:
    """True if so many more may be opened. It makes `wanted` system calls, and reads a folder if nearly all are in use."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return True
    if not any(map(_is_open, range(max(0, limit - wanted), limit))):  # the lowest free number is always opened next
        return limit >= wanted
    try:
        used = sum(int(name) < limit for name in os.listdir("/proc/self/fd"))
    except OSError:  # not even one for the listing
        return False
    return limit - used >= wanted


def _is_open(fd: int) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_GETFD)
    except OSError:
        return False
    return True
