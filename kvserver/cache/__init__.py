"""The decisions of L1: which chunks are resident, in which pages, and which are evicted."""

from kvserver.cache.cache import Cache
from kvserver.cache.chunk import Chunk, ModelUse, Namespace
from kvserver.cache.eviction import POLICIES
from kvserver.cache.groups import WHOLE_CHUNKS, GroupObjects, Groups, one_group
from kvserver.cache.index import ChunkRows, Index, split_keys
from kvserver.cache.misses import LookupOutcome, MissReason, counted_in_l2, filled_to
from kvserver.cache.namespace import (
    SLOT_FORMAT,
    check_agreement,
    chunks_of,
    counted,
    epoch_of,
    fingerprint,
    fingerprint_parts,
    private_reason,
    split_namespace,
    tails_of,
    with_variant,
)
from kvserver.cache.pages import PagePool, extents, page_bytes_for, page_count
from kvserver.cache.protections import (
    MOST_NAMES,
    MOST_OF_REQUESTS,
    MOST_PROTECTIONS,
    Name,
    Protection,
    ProtectionEnd,
)
from kvserver.cache.sessions import SessionKey, SessionRecord
from kvserver.cache.store_plan import StorePlan
