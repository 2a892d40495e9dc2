"""SGLang's external linker over the daemon: `KVServerLinker`.

Owns: construction, and the fence that keeps every exception of the linker out of the engine. Refuses to know: how anything is
decided.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

import sglang
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import LayerWiseLoadCounter, UnifiedCacheLinker
from sglang.srt.mem_cache.utils import get_hash_str
from sglang.srt.runtime_context import get_parallel

from kvserver.adapters.common.exporter import CannotShare
from kvserver.adapters.common.faults import Faults
from kvserver.adapters.common.link import Link
from kvserver.adapters.common.log import log
from kvserver.adapters.common.planes import UnsupportedLayout
from kvserver.adapters.common.send_queue import DirectSendQueue, OrderedSendQueue, SendQueue
from kvserver.adapters.common.settings import read_settings
from kvserver.adapters.sglang.cache import Part, RankCache
from kvserver.adapters.sglang.contract import differences, without_cache
from kvserver.adapters.sglang.events import EventsAddress, events_of
from kvserver.adapters.sglang.kept_slots import Allocator, KeptSlots
from kvserver.adapters.sglang.loads import LoadEnd
from kvserver.adapters.sglang.names import names_of
from kvserver.adapters.sglang.pools import MAMBA, pools_of
from kvserver.adapters.sglang.ranks import Ranks, ranks_of
from kvserver.adapters.sglang.registration import PoolRegistration
from kvserver.adapters.sglang.settings import SGLangSettings
from kvserver.adapters.sglang.streams import BothStreams
from kvserver.adapters.sglang.support import unsupported
from kvserver.adapters.sglang.updates import follow_updates
from kvserver.adapters.versions import tested_with_sglang

R = TypeVar("R")


def fenced(default: Any = None) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """An exception in the method is counted, logged once per place and kind, and the method returns `default`; so it does without cache."""

    def decorate(method: Callable[..., R]) -> Callable[..., R]:
        @functools.wraps(method)
        def call(self: Linker, *args: Any, **kwargs: Any) -> Any:
            try:
                if self.cache is not None:
                    return method(self, self.cache, *args, **kwargs)
            except Exception as error:
                self.faults.count(method.__name__, error)
            return default() if callable(default) else default

        return call

    return decorate


class Linker(UnifiedCacheLinker):  # type: ignore[misc]
    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: Any,
        extra_config: dict[str, Any],
        forward_stream: Any = None,
        **unknown: Any,
    ) -> None:
        self.faults = Faults()
        self.cache: RankCache | None = None  # None: the engine runs without cache
        self.forward_stream = forward_stream
        self.layer_done_counter = LayerWiseLoadCounter(0)  # no layer waits: a load is over before its batch begins
        allocator = params.token_to_kv_pool_allocator
        # SGLang looks for names here: it has no windows loaded, and none stored, where there is no "swa".
        self.pools: dict[Any, Any] = {PoolName.KV: allocator.get_kvcache()}
        self._page_tokens = int(params.page_size)
        self._groups: dict[str, int] = {}  # by the names of transfers
        self._allocators: list[Allocator] = []  # by group
        self._kept_slots = KeptSlots()
        # SGLang compiles this when it is first used, for any linker. Without a compiler its first request would end the engine: better now.
        get_hash_str([0], None, page_size=1)
        self._ranks = Ranks()
        why = f"SGLang passes {', '.join(sorted(unknown))}, which this adapter does not know" if unknown else None
        try:
            why = (
                why or unsupported(server_args, self._page_tokens, components) or follow_updates(self._weights_updated)
            )
        except Exception as error:
            self.faults.count("construction", error)
            why = "see the fault above"
        try:
            self._ranks = ranks_of(params, get_parallel().tp_rank, get_parallel().tp_size)
            log_versions(self._ranks.number)
            if not all(self._ranks.least([why is None])):  # else one rank would wait for another in a reduction
                why = why or "another rank of it does"
            if why is None:
                self.cache = self._set_up(server_args, params, extra_config)
        except (UnsupportedLayout, CannotShare, ValueError) as reason:  # ValueError: of a setting
            why = str(reason)
        except Exception as error:
            self.faults.count("construction", error)
            why = "see the fault above"
        if why is not None:
            log.warning("kvserver: this engine runs without cache: %s", why)

    def _set_up(self, server_args: Any, params: Any, extra_config: dict[str, Any]) -> RankCache:
        settings = read_settings(SGLangSettings, extra_config)
        names = names_of(server_args, settings, self._ranks, get_parallel().dp_rank)
        pools = pools_of(params, self._page_tokens)
        self._groups = {pool.name: number for number, pool in enumerate(pools)}
        self._allocators = [Allocator(pool.allocator, pool.row_slots) for pool in pools]
        registration = PoolRegistration(settings, names, self._ranks, pools, self._page_tokens, server_args)
        links = Link(settings.endpoint, "scheduler"), registration.link()
        for link in links:
            link.start(settings.connect_timeout_ms / 1000)
        queue = self._send_queue(registration.on_gpu)
        events = EventsAddress()
        with self.faults.guarded("addresses of KV events"):
            events = events_of(server_args.kv_events_config, get_parallel().dp_rank)
        cache = RankCache(
            settings, names, links, registration.rank, queue, self.faults, self._page_tokens, events, len(pools),
            hashes_pairs=params.is_eagle and MAMBA not in self._groups,  # as SGLang's tree decides
        )  # fmt: skip
        self.pools |= {PoolName(pool.name): pool for pool in pools[1:]}
        return cache

    def _send_queue(self, on_gpu: bool) -> SendQueue:
        """On a GPU messages wait for what the engine has queued on the pages, on the scheduler's stream and on the forward's."""
        return OrderedSendQueue(lambda: BothStreams(self.forward_stream)) if on_gpu else DirectSendQueue()

    # ---- lookups and loads --------------------------------------------------------------------

    @fenced(list)
    def lookup(self, cache: RankCache, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        if {transfer.name for transfer in transfers} != self._groups.keys() or not (keys := transfers[0].keys):
            return []
        # SGLang takes the longest one, and of several ranks the longest that all have.
        if self._ranks.size > 1:
            return list(cache.lookup(rid, keys))
        return [longest] if (longest := cache.longest(rid, keys)) else []

    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        """Copy the pages now: SGLang aborts a request whose load fails later, and computes one whose load is refused."""
        copies, end = self._load(rid, transfers)
        (least,) = self._ranks.least([end])
        if least == LoadEnd.STILL_WRITTEN:  # on any rank: all must have equally many free slots
            slots = [(self._allocators[self._groups[each.name]], each.device_indices) for each in transfers]
            self._kept_slots.keep(copies, slots)
            for transfer in transfers:
                transfer.device_indices = transfer.device_indices[:0]  # SGLang frees what a refused transfer names
        return least == LoadEnd.LOADED

    @fenced(lambda: ([], LoadEnd.FAILED))
    def _load(self, cache: RankCache, rid: str, transfers: list[PoolTransfer]) -> tuple[list[int], LoadEnd]:
        return cache.load(rid, self._parts(transfers))

    @fenced(-1)
    def start_layer_wise_loading(self, cache: RankCache) -> int:
        """SGLang is about to run a batch that prefills. Nothing is left to load."""
        cache.batch_begins()
        return -1

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        return True

    def cancel_queued_load(self, rid: str) -> bool:
        return False

    # ---- stores -------------------------------------------------------------------------------

    def offload(self, transfers: list[PoolTransfer], session_id: str | None = None) -> bool:
        begun = self._store(transfers, session_id or "")
        if self._ranks.least([begun]) == [True]:
            return True
        if begun and self.cache is not None:
            self.cache.drop_newest_store()
        return False

    @fenced(False)
    def _store(self, cache: RankCache, transfers: list[PoolTransfer], session_id: str) -> bool:
        return cache.store(self._parts(transfers), session_id)

    def num_completed_offloads(self) -> int:
        """SGLang's first call in each pass of its scheduler."""
        ended = self._next_pass()
        if copies := self._kept_slots.copies:
            done = [self.cache is None or not any(map(self.cache.is_in_flight, of_load)) for of_load in copies]
            self._kept_slots.release([bool(done) for done in self._ranks.least(done)])
        return ended

    @fenced(0)
    def _next_pass(self, cache: RankCache) -> int:
        self._kept_slots.hold_back()
        cache.next_pass()
        return cache.stores_ended()

    @fenced(False)
    def pop_completed_offload(self, cache: RankCache) -> bool:
        return cache.pop_store()

    # ---- lifecycle ----------------------------------------------------------------------------

    @fenced()
    def reset(self, cache: RankCache) -> None:
        self._kept_slots.flushed()
        cache.reset()

    @fenced()
    def _weights_updated(self, cache: RankCache) -> None:
        cache.weights_updated()

    @fenced()
    def close(self, cache: RankCache) -> None:
        cache.close()

    def _parts(self, transfers: list[PoolTransfer]) -> list[Part]:
        """The transfers by object group, that of full attention first. KeyError if one is of a pool that is not served."""
        parts = [self._part(self._groups[transfer.name], transfer) for transfer in transfers]
        assert parts[0].group == 0, "a copy of full attention"
        return parts

    def _part(self, group: int, transfer: PoolTransfer) -> Part:
        """Slots are those of whole rows, in order."""
        size, slots = self._allocators[group].row_slots, transfer.device_indices
        rows = [slot // size for slot in slots[::size].tolist()]
        assert len(rows) * size == slots.numel(), "slots of whole rows"
        assert len(rows) == len(transfer.keys), "a row for each key"
        return Part(group, transfer.keys, rows)


def log_versions(rank: int) -> None:
    """Name the tested versions, once for all ranks: a warning where this SGLang is none of them."""
    tested, line = tested_with_sglang(sglang.__version__)
    if rank == 0:
        log.log(logging.INFO if tested else logging.WARNING, line)


_differences = differences(UnifiedCacheLinker)
KVServerLinker: type = Linker
if _differences:
    KVServerLinker = without_cache(
        UnifiedCacheLinker,
        f"SGLang {sglang.__version__} has another linker interface: {'; '.join(_differences)}",
        lambda: LayerWiseLoadCounter(0),
    )
