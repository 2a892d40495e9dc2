"""Errors that a peer or an operator can get.

Owns: the codes and the exceptions. Refuses to know: where errors are raised or sent.
"""

from __future__ import annotations

import enum

CONNECTION_REFUSED = (
    "connection_refused"  # counted beside the codes: a connection of another user, or beyond the limit of connections
)


class ErrorCode(str, enum.Enum):
    """Code of an error, for programs. The message beside the code is for people."""

    BAD_FRAMES = "bad_frames"  # not [8-byte request id][payload]
    BAD_MESSAGE = "bad_message"  # not msgpack, unknown type, missing field or wrong type
    TOO_LARGE = "too_large"  # more bytes, chunks or KV than the server accepts
    VERSION_MISMATCH = "version_mismatch"
    BAD_TOKEN = "bad_token"  # the .fd socket was opened without this boot's token
    UNKNOWN_ATTACHMENT = "unknown_attachment"
    UNKNOWN_INSTANCE = "unknown_instance"
    UNKNOWN_RANK = "unknown_rank"
    DUPLICATE_INSTANCE = "duplicate_instance"  # another live incarnation is registered with this id or rank
    RANKS_DISAGREE = "ranks_disagree"
    NOT_READY = "not_ready"  # not all ranks of the instance have registered
    STALE_BOOT = "stale_boot"  # the server has restarted since the sender's Hello
    STALE_REGISTRATION = "stale_registration"
    LATE = "late"  # the request arrived after its deadline
    BAD_PLANES = "bad_planes"
    BAD_MEMORY = "bad_memory"
    BAD_KEYS = "bad_keys"
    BAD_BLOCKS = "bad_blocks"
    BAD_RECORDS = "bad_records"
    REPORT_GAP = "report_gap"  # reports were lost; the server needs the engine's full state
    NOT_FOUND = "not_found"  # a chunk to load is not READY, or no longer READY
    CANCELLED = "cancelled"
    MEMORY_LOST = "memory_lost"  # the engine truncated memory it had registered
    DEVICE_LOST = "device_lost"  # the device that copies for the server is lost; the server answers, but cannot copy
    SHARED = "shared"  # other instances or machines may use what was to be cleared; the message names them
    STORAGE = "storage"  # a tier of L2 failed; the message names it
    NO_DESCRIPTORS = (
        "no_descriptors"  # the server has too few left to attach a worker; the message names the limit to raise
    )
    INTERNAL = "internal"


class KVServerError(Exception):
    """Expected failure. The server answers it with `Error`; the command line prints it as one line."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class ConfigError(Exception):
    """Settings with which the daemon cannot start; the message names the flag to change."""
