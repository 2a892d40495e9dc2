"""L2, the storage behind L1: tiers that hold objects beyond this process, by one contract (`base`)."""

from kvserver.l2.base import (
    COVERAGE_BYTES,
    READABLE,
    LocalTier,
    ObjectMemory,
    ObjectName,
    StorageTier,
    TierEnd,
    TierOutcome,
)
from kvserver.l2.coverage import Coverage, coverages_of
from kvserver.l2.files.tier import THREADS as FILE_THREADS
from kvserver.l2.files.tier import FileTier
from kvserver.l2.kinds import make_tier
from kvserver.l2.remote.buffer import LaneBuffer
from kvserver.l2.remote.make import LANES, store_of, why_not_served
from kvserver.l2.remote.store import StoreError
