"""Eviction policies: one file each, the contract in `policy.py`, the names of `--eviction-policy` here."""

from kvserver.cache.eviction.lru import LeastRecentlyUsed
from kvserver.cache.eviction.policy import EvictionPolicy

POLICIES: dict[str, type[EvictionPolicy]] = {"lru": LeastRecentlyUsed}
