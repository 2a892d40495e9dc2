"""L2 as the loop uses it, by one face, `Storage`. Also the resync of L1, which runs as L2's does."""

from kvserver.tiering.prefetches import MOST_PREFETCHES, Prefetch, Prefetches
from kvserver.tiering.resync import Resync, resync_of_l1
from kvserver.tiering.storage import Storage
from kvserver.tiering.tiered import make_storage
from kvserver.tiering.tiers import ConfiguredTier, Tiers
