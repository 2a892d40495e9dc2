"""SGLang's page hashes as the daemon's keys.

Both are 32 bytes. Short forms differ: the daemon and vLLM name a block by the last 8 bytes of its hash, SGLang by the first 8. So a
key is the hash with its first 8 bytes moved to the end. Then all short forms of a key agree with SGLang's.

Owns: that form. Refuses to know: how SGLang hashes.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

_WORDS = 4  # of 8 bytes in a hash


def packed(hashes: Sequence[str]) -> bytes:
    """The keys of these hashes, hexadecimal digits each, end to end."""
    return keys_of(bytes.fromhex("".join(hashes)))


def keys_of(hashes: bytes) -> bytes:
    """The keys of these hashes, 32 bytes each, end to end."""
    words = array("Q", hashes)
    first = words[::_WORDS]
    words.append(0)
    words = words[1:]  # all words but the last of each key
    words[_WORDS - 1 :: _WORDS] = first
    return words.tobytes()
