"""The parts of messages: base structs and field types with bounds.

Owns: the two forms of a message and the bounds. Refuses to know: any message.
"""

from __future__ import annotations

import enum
from hashlib import blake2b
from typing import Annotated

import msgspec
from msgspec import Meta

KEY_BYTES = 32
TOKEN_BYTES = 4  # of a token id, little-endian
CONTENT_BYTES = 8  # of a content id in a block report
MAX_CHUNKS = 16384  # keys in one message
MAX_SESSION_ID = 256  # characters
MAX_PIN_SECONDS = 7 * 86400
TENANT = r"^[A-Za-z0-9._-]{0,64}\Z"  # names of tenants, which are labels of metrics; "": none
TENANT_PREFIX = "tenant:"  # of a tenant's name in --share

Name = Annotated[str, Meta(min_length=1, max_length=512)]
Text = Annotated[str, Meta(max_length=4096)]
Label = Annotated[str, Meta(max_length=512)]
SessionId = Annotated[str, Meta(max_length=MAX_SESSION_ID)]
SaltDigest = Annotated[bytes, Meta(max_length=16)]  # of a cache salt, by salt_digest()
Small = Annotated[int, Meta(ge=0, le=1 << 20)]
Positive = Annotated[int, Meta(gt=0, le=1 << 31)]
Tokens = Annotated[int, Meta(ge=0, le=1 << 31)]  # of one request
Unsigned = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Bytes = Annotated[int, Meta(ge=0, le=1 << 62)]
Size = Annotated[int, Meta(gt=0, le=1 << 62)]
Ratio = Annotated[float, Meta(ge=0)]
Keys = Annotated[bytes, Meta(max_length=MAX_CHUNKS * KEY_BYTES)]


def salt_digest(salt: str | None) -> bytes:
    """Digest that names a cache salt in messages without stating it."""
    return blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=16).digest() if salt else b""


class Durability(enum.IntEnum):
    """Readers that can find an object again by its name, and so the tiers of L2 that may have it."""

    PROCESS = 0  # this start of the engine only: it goes to no tier
    MACHINE = 1  # a later start too, on this machine: to tiers of this machine
    ANYWHERE = 2  # engines on other machines too: to all tiers


class Message(msgspec.Struct, tag_field="type", tag=True):
    """A msgpack map by field names."""


class ArrayMessage(msgspec.Struct, tag_field="type", tag=True, array_like=True):
    """A msgpack array, `[type, field, ...]`."""
