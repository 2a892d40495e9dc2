"""Which blocks consumers of the engine's stream believe a tier to hold, so that none is told twice.

The daemon tells all it holds anew when it lost track of us, or was replaced. What it tells again is no news; what it does
not is gone.

Owns: the hashes, 53 to 107 bytes of memory each. Refuses to know: messages, vLLM's events.
"""

from __future__ import annotations

import secrets

from kvserver._native import HashCounts

_SLICE_BYTES = 32  # a hash as HashCounts.slice() has it


class AnnouncedBlocks:
    """Of one medium and KV cache group; all hashes have `hash_bytes`."""

    def __init__(self, hash_bytes: int) -> None:
        self.hash_bytes = hash_bytes
        self._announced = _no_hashes()  # since begin()
        self._before: list[HashCounts] = []  # told earlier, and not since; no hash is in two of them all
        self._cursor = 0  # in the first of these

    def __len__(self) -> int:
        return len(self._announced) + sum(map(len, self._before))

    def begin_resync(self) -> None:
        """All is told anew from here on."""
        if len(self._announced):
            self._before.append(self._announced)
            self._announced = _no_hashes()

    def stored(self, hashes: bytes) -> bytes:
        """One byte for each: 1 if it is news."""
        news = self._announced.add(hashes, self.hash_bytes)
        for before in self._before:
            known = before.contains(hashes, self.hash_bytes)
            before.remove(hashes, self.hash_bytes)
            news = bytes(new and not old for new, old in zip(news, known, strict=True))
        return news

    def removed(self, hashes: bytes) -> bytes:
        """One byte for each: 1 if it is news."""
        return self._announced.remove(hashes, self.hash_bytes)

    def pop_unconfirmed(self, most: int) -> bytes:
        """Up to `most` of those that were not told since begin(); they are held no more."""
        while self._before:
            first = self._before[0]
            padded, self._cursor = first.slice(self._cursor, most)
            hashes = b"".join(padded[at : at + self.hash_bytes] for at in range(0, len(padded), _SLICE_BYTES))
            first.remove(hashes, self.hash_bytes)
            if hashes:
                return hashes
            self._cursor = 0  # some move to places before it when others go
            if not len(first):
                del self._before[0]
        return b""


def _no_hashes() -> HashCounts:
    return HashCounts(secrets.randbits(64))
