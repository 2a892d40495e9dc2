"""Eviction policies that were tried and are not part of kvserver: ../README.md has what they find. They keep the contract of `kvserver.cache.eviction`."""

from kvserver.cache.eviction import EvictionPolicy
from policies.lfu import LeastFrequentlyUsed
from policies.s3_fifo import S3Fifo

TRIED: dict[str, type[EvictionPolicy]] = {policy.name: policy for policy in (S3Fifo, LeastFrequentlyUsed)}
