"""Eviction policies: one file each, the contract in `policy.py`, the names of `--eviction-policy` here."""

from kvserver.cache.eviction.lru import LeastRecentlyUsed
from kvserver.cache.eviction.policy import EvictionPolicy
from kvserver.cache.eviction.rings import RingChunk, empty_ring, link, oldest, unlink, youngest_first
from kvserver.cache.eviction.slru import ProtectedSegment

POLICIES: dict[str, type[EvictionPolicy]] = {policy.name: policy for policy in (LeastRecentlyUsed, ProtectedSegment)}
