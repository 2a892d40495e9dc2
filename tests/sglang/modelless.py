"""SGLang's pools, its tree and our linker against a daemon, in the test's process and without a model: a test is what computes."""

from __future__ import annotations

import itertools
import json
import os
import time
from array import array
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from engine_environment import ENVIRONMENT
from sglang.srt.disaggregation.kv_events import EventPublisher, EventPublisherFactory, KVEventBatch
from sglang.srt.managers.schedule_batch import ReqKvInfo
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from support.daemon import Daemon, wait_until

from kvserver.adapters.sglang import KVServerLinker

PAGE = 32
os.environ |= {
    name: ENVIRONMENT[name] for name in ("PATH", "TORCH_EXTENSIONS_DIR")
}  # SGLang's hash of pages is compiled
# Tests compare what was found and loaded, also on a busy machine: no answer is late, and no rate bounds a load.
EXTRA: dict[str, Any] = {
    "kvserver.load_share": 1000.0,
    "kvserver.lookup_poll_ms": 1000,
    "kvserver.lookup_timeout_ms": 5000,
    "kvserver.on_prefix_reset": "keep",
}


def prepare(model: str, page: int = PAGE, **options: Any) -> ServerArgs:
    """Arguments of an engine, which become those of this process."""
    arguments = ServerArgs(model_path=model, device="cpu", page_size=page, **options)
    set_global_server_args_for_scheduler(arguments)
    get_parallel().override_permanently(tp_rank=0, tp_size=1, attn_dp_rank=0, dp_rank=None)
    return arguments


class Scheduler:
    """SGLang's tree over its pools, with a linker, and what a scheduler does with a request.

    `linker`: a class, or None for SGLang's own cache alone. `before`: what is done to SGLang's parameters before the linker sees them.
    It publishes KV events where the arguments state it.
    """

    def __init__(
        self,
        arguments: ServerArgs,
        params: CacheInitParams,
        endpoint: str,
        *,
        linker: type | None = KVServerLinker,
        extra: dict[str, Any] | None = None,
        before: Callable[[CacheInitParams], object] = lambda params: None,
        **more: Any,
    ) -> None:
        self.params, self.allocator = params, params.token_to_kv_pool_allocator
        config = arguments.kv_events_config
        self.publisher: EventPublisher | None = EventPublisherFactory.create(config) if config else None
        params.enable_kv_cache_events = self.publisher is not None
        self.tree = UnifiedRadixCache(params)
        before(params)
        self.linker: Any = None
        self._ids = itertools.count()
        if linker is not None:
            settings = {"kvserver.endpoint": endpoint, **EXTRA, **(extra or {})}
            components = set(self.tree.components)
            self.linker = linker(arguments, params, components=components, extra_config=settings, **more)
            self.tree.init_cache_linker(self.linker)

    def close(self) -> None:
        if self.linker is not None:
            self.linker.close()
        if self.publisher is not None:
            self.publisher.shutdown()

    def next_pass(self) -> None:
        self.tree.check_hicache_events()
        if self.publisher is not None and (events := self.tree.take_events()):
            self.publisher.publish(KVEventBatch(ts=time.time(), events=events))

    def flush(self) -> None:
        """Empty the cache as SGLang's flush does."""
        self.tree.reset()
        self.params.req_to_token_pool.clear()
        self.allocator.clear()
        self.next_pass()

    def wait_for_daemon(self, daemon: Daemon) -> None:
        """Wait until a daemon that was started again has the rank, and the scheduler's messages reach it."""
        wait_until(
            lambda: [one for one in daemon.status()["instances"] if one["namespace"]], 20, "the rank is registered"
        )
        wait_until(lambda: self.next_pass() or self.linker.cache._dispatcher.usable(), 20, "the scheduler is connected")

    def wait_for_stores(self, seconds: float = 20) -> None:
        wait_until(lambda: self.next_pass() or not self.tree.linker.pending_offloads, seconds, "the ends of stores")

    def request(self, tokens: Sequence[int], rid: str = "", extra: str | None = None) -> Any:
        """A stand-in of SGLang's request, with the fields that the tree reads."""
        return SimpleNamespace(
            rid=rid or f"r{next(self._ids)}", key=RadixKey(array("q", tokens), extra), last_node=None, kv=ReqKvInfo(),
            prefix_len=0, swa_branching_seqlen=None, session=None, host_hit_length=0,
        )  # fmt: skip

    def match(self, request: Any) -> Any:
        """SGLang's answer: the part of the prompt that its own cache has, and the part that the linker found."""
        found = self.tree.match_prefix(MatchPrefixParams(key=request.key, req=request))
        request.last_node, request.prefix_len = found.last_device_node, found.device_prefix_len
        return found

    def hit(self, request: Any) -> int:
        return int(self.match(request).host_hit_length)

    def load(self, request: Any) -> torch.Tensor:
        """Load the hit that was found for the request. Returns its slots, none if it was refused."""
        self.tree.linker.load_back(request)
        return self.tree.linker.private_load_indices.pop(request.rid, torch.empty(0, dtype=torch.int64))


class Stage(Scheduler):
    """A scheduler with one pool of MHA, whose bytes the test chooses."""

    def __init__(
        self,
        model: str,
        endpoint: str,
        *,
        tokens: int = 4096,
        layers: int = 2,
        heads: int = 2,
        head: int = 16,
        dtype: torch.dtype = torch.float32,
        kv_events: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        arguments = prepare(model, kv_events_config=json.dumps(kv_events) if kv_events else None)
        self.pool = MHATokenToKVPool(
            tokens, page_size=PAGE, dtype=dtype, layer_num=layers, device="cpu", enable_memory_saver=False,
            head_num=heads, head_dim=head,
        )  # fmt: skip
        allocator = PagedTokenToKVPoolAllocator(
            tokens, page_size=PAGE, dtype=dtype, device="cpu", kvcache=self.pool, need_sort=False
        )
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=ReqToTokenPool(64, tokens, "cpu", enable_memory_saver=False),
            token_to_kv_pool_allocator=allocator,
            page_size=PAGE,
            tree_components=(ComponentType.FULL,),
        )
        self.written = torch.empty(0)  # KV that a test compares
        super().__init__(arguments, params, endpoint, **options)

    def forget(self, zero: bool = True) -> None:
        """Empty the cache as SGLang's flush does, and zero all KV."""
        self.flush()
        for tensor in (*self.pool.k_buffer, *self.pool.v_buffer) if zero else ():
            tensor.zero_()

    def insert(self, tokens: Sequence[int]) -> torch.Tensor:
        """Insert slots into the tree, which stores their KV. Returns them."""
        return self.compute(tokens, seed=None)

    def compute(self, tokens: Sequence[int], seed: int | None = 0, session_id: str | None = None) -> torch.Tensor:
        """Write KV into new slots, unless `seed` is None, and insert them."""
        slots = self.allocator.alloc(len(tokens))
        if seed is not None:
            source = torch.Generator().manual_seed(seed)
            for tensor in (*self.pool.k_buffer, *self.pool.v_buffer):
                tensor[slots] = torch.randn(len(tokens), *tensor.shape[1:], generator=source).to(tensor.dtype)
        self.tree.insert(InsertParams(key=RadixKey(array("q", tokens)), value=slots, session_id=session_id))
        return slots

    def kv(self, slots: torch.Tensor) -> torch.Tensor:
        return torch.stack([tensor[slots].flatten(1) for tensor in (*self.pool.k_buffer, *self.pool.v_buffer)])
