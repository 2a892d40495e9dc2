"""Hashes of the blocks of a tier that were announced on the engine's stream, so that none is announced twice.

The daemon sends all blocks again after it lost the engine's position, and after it was replaced. Among them, a known block is not
announced again, and a known block that is missing has left the tier.

Owns: the hashes, 53 to 107 bytes of memory each. Refuses to know: messages, vLLM's events.
"""

from __future__ import annotations

import secrets

from kvserver._native import HashCounts

_SLICE_BYTES = 32  # of one hash in HashCounts.slice()


class AnnouncedBlocks:
    """The announced blocks of one medium and one KV cache group; all hashes have `hash_bytes`."""

    def __init__(self, hash_bytes: int) -> None:
        self.hash_bytes = hash_bytes
        self._announced = _no_hashes()  # since begin_resync()
        self._before: list[
            HashCounts
        ] = []  # announced earlier, not confirmed since; a hash is in one of all these sets
        self._cursor = 0  # in the first of `_before`

    def __len__(self) -> int:
        return len(self._announced) + sum(map(len, self._before))

    def begin_resync(self) -> None:
        """Begin a resync: from now on the daemon sends all blocks again."""
        if len(self._announced):
            self._before.append(self._announced)
            self._announced = _no_hashes()

    def stored(self, hashes: bytes) -> bytes:
        """One byte for each hash: 1 if consumers do not know the block."""
        news = self._announced.add(hashes, self.hash_bytes)
        for before in self._before:
            known = before.contains(hashes, self.hash_bytes)
            before.remove(hashes, self.hash_bytes)
            news = bytes(new and not old for new, old in zip(news, known, strict=True))
        return news

    def removed(self, hashes: bytes) -> bytes:
        """One byte for each hash: 1 if consumers know the block."""
        return self._announced.remove(hashes, self.hash_bytes)

    def pop_unconfirmed(self, most: int) -> bytes:
        """Up to `most` hashes that were not sent since begin_resync(); they no longer count as announced."""
        while self._before:
            first = self._before[0]
            padded, self._cursor = first.slice(self._cursor, most)
            hashes = b"".join(padded[at : at + self.hash_bytes] for at in range(0, len(padded), _SLICE_BYTES))
            first.remove(hashes, self.hash_bytes)
            if hashes:
                return hashes
            self._cursor = 0  # a removal may move hashes to places before the cursor
            if not len(first):
                del self._before[0]
        return b""


def _no_hashes() -> HashCounts:
    return HashCounts(secrets.randbits(64))
