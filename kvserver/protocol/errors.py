"""Every error a peer or an operator can meet, on one page.

Owns: the codes and the exception that carries one. Refuses to know: who raises or sends them.
"""

from __future__ import annotations

import enum

CONNECTION_REFUSED = "connection_refused"  # counted beside the codes: a connection of another user, or one too many


class ErrorCode(str, enum.Enum):
    """What went wrong, for programs. The message beside it is for people."""

    BAD_FRAMES = "bad_frames"  # not [8-byte request id][payload]
    BAD_MESSAGE = "bad_message"  # not msgpack, unknown type, missing field or wrong type
    TOO_LARGE = "too_large"  # more bytes, chunks or KV than the server takes
    VERSION_MISMATCH = "version_mismatch"
    BAD_TOKEN = "bad_token"  # the .fd socket was opened without this boot's token
    UNKNOWN_ATTACHMENT = "unknown_attachment"
    UNKNOWN_INSTANCE = "unknown_instance"
    UNKNOWN_RANK = "unknown_rank"
    DUPLICATE_INSTANCE = "duplicate_instance"  # another live incarnation holds this id or rank
    RANKS_DISAGREE = "ranks_disagree"
    NOT_READY = "not_ready"  # not all ranks of the instance have registered
    STALE_BOOT = "stale_boot"  # sent to a server that has restarted since
    STALE_REGISTRATION = "stale_registration"
    LATE = "late"  # its deadline had passed
    BAD_PLANES = "bad_planes"
    BAD_MEMORY = "bad_memory"
    BAD_KEYS = "bad_keys"
    BAD_BLOCKS = "bad_blocks"
    BAD_RECORDS = "bad_records"
    REPORT_GAP = "report_gap"  # reports were lost; the server wants the engine's full state
    NOT_FOUND = "not_found"  # a chunk to load is not, or no longer, READY
    CANCELLED = "cancelled"
    MEMORY_LOST = "memory_lost"  # the engine truncated memory it had registered
    DEVICE_LOST = "device_lost"  # what copies for the server is gone; it answers, but nothing can be moved
    INTERNAL = "internal"


class KVServerError(Exception):
    """An expected failure: becomes an `Error` reply, or one line on the command line."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class ConfigError(Exception):
    """The daemon cannot start as it is configured; the message names the flag to change."""
