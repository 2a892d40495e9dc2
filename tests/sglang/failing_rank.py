"""Linkers of which the last rank fails: its loads, or its construction."""

from __future__ import annotations

from typing import Any

from sglang.srt.runtime_context import get_parallel

from kvserver.adapters.common.exporter import CannotShare
from kvserver.adapters.sglang import KVServerLinker
from kvserver.adapters.sglang.cache import RankCache
from kvserver.adapters.sglang.loads import LoadEnd


class FailingRank(KVServerLinker):  # type: ignore[misc, valid-type]
    def _load(self, rid: str, transfers: list[Any]) -> tuple[list[int], LoadEnd]:
        copies, end = super()._load(rid, transfers)
        return copies, end if get_parallel().tp_rank == 0 else LoadEnd.FAILED


class RefusedRank(KVServerLinker):  # type: ignore[misc, valid-type]
    def _set_up(self, *args: Any) -> RankCache:
        cache: RankCache = super()._set_up(*args)
        if get_parallel().tp_rank == 0:
            return cache
        cache.close()
        raise CannotShare("a test")
