"""L1's memory in the descriptor store of the service manager: systemd keeps it over a restart of the unit, and frees it at a stop.

Two memfds, L1 and its state, are in the store from the first start on. The state's is empty while a daemon runs, so that one that crashes
leaves none. A start with another --l1-file, or that gets one of the two alone, has the store drop what it has: its memory would stay in use.

Owns: these two. Refuses to know: the messages (`service_manager`), sizes (`l1_file`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from kvserver.config import FDSTORE
from kvserver.restart.l1_file import L1File
from kvserver.service_manager import drop_descriptors, keep_descriptors, kept_descriptors

log = logging.getLogger(__name__)

_L1, _STATE = "kvserver-l1", "kvserver-l1-state"


def drop_stored_l1() -> None:
    """Free the L1 that an earlier start of the unit left in the store."""
    _drop(_stored())


def _stored() -> dict[str, int]:
    return {name: fd for name, fd in kept_descriptors().items() if name in (_L1, _STATE)}


def _drop(stored: dict[str, int]) -> None:
    try:
        drop_descriptors(stored)
    except OSError as error:
        log.warning("the service manager keeps the memory of an earlier L1 until a stop of the unit: %s", error)


class StoredL1File(L1File):
    """ConfigError if no service manager started this process."""

    freed_by = "a stop of the unit"
    kept_if = ", if the unit keeps them (FileDescriptorStoreMax=2)"

    def __init__(self) -> None:
        self.path = FDSTORE
        kept = _stored()
        if len(kept) < 2:
            _drop(kept)
            kept = {name: os.memfd_create(name) for name in (_L1, _STATE)}
            try:
                keep_descriptors(kept)
            except OSError as error:
                raise self._refusal(f"no service manager keeps it ({error}); start the daemon by systemd") from None
        self.fd, self._state_fd = kept[_L1], kept[_STATE]
        self._kind, self.state_path = "tmpfs", "its state"
        self._look()

    def read_state(self) -> bytes | None:
        return os.pread(self._state_fd, os.fstat(self._state_fd).st_size, 0) or None

    def remove_state(self) -> None:
        os.ftruncate(self._state_fd, 0)

    def write_state(self, parts: Sequence[bytes]) -> None:
        with open(self._state_fd, "wb", closefd=False) as file:
            file.seek(0)  # where the last daemon's ended: it had the same open file
            file.writelines(parts)
