"""Loads under way while vLLM resets its prefix cache.

vLLM resets its block pool only while no request has a block. With `reset_running_requests`, as for a pause, it first takes the
blocks from the running requests, but not from those that wait for a load. So `pause_generation(mode="keep", clear_cache=True)`
raises beside a load of any connector. Such a load brings KV from before the reset, and nothing was computed upon it. So the pool
may count the blocks as free, if vLLM begins the request again once its load has ended, as it does after a failed load.

Owns: the requests that wait for a load, and their blocks. Refuses to know: pins, copies and how a load is cancelled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.v1.request import RequestStatus

from kvserver.adapters.common.steps import NULL_BLOCK
from kvserver.adapters.vllm.chunks import Tables
from kvserver.adapters.vllm.nesting import resets_running_requests

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass(slots=True)
class _Waiting:
    request: Request
    blocks: list[int]
    ended: bool = False  # vLLM has the report of the load's end


class WaitingForLoads:
    """Requests that wait for a load, by request.

    `begin_again` makes vLLM begin these requests again once their loads have ended; None if this vLLM cannot.
    """

    def __init__(self) -> None:
        self.begin_again: Callable[[set[str]], Any] | None = None
        self._waiting: dict[str, _Waiting] = {}

    def began(self, request: Request, tables: Tables) -> None:
        """vLLM has allocated these blocks, which a load fills."""
        self._waiting[request.request_id] = _Waiting(request, _blocks(tables))

    def placed(self, request_id: str) -> None:
        """vLLM has placed the request after its load."""
        self._waiting.pop(request_id, None)

    def request_ended(self, request_id: str, tables: Tables) -> None:
        """vLLM frees these blocks with the end of the load, which it may have."""
        if (found := self._waiting.get(request_id)) is not None:
            found.blocks = _blocks(tables)
            if found.ended:
                del self._waiting[request_id]

    def loads_ended(self, request_ids: Iterable[str]) -> None:
        """vLLM receives the ends of these requests' loads."""
        for request_id in request_ids:
            if (found := self._waiting.get(request_id)) is not None:
                found.ended = True
                if found.request.is_finished():
                    del self._waiting[request_id]

    def blocks(self) -> list[list[int]]:
        """Blocks upon whose content nothing was computed, by request. Empty if the reset is to disturb no request."""
        if not resets_running_requests():
            return []
        return [each.blocks for each in self._waiting.values() if self._may_forget(each)]

    def reset(self) -> list[str]:
        """The pool was reset: the requests that begin again."""
        found = [id for id, each in self._waiting.items() if self._may_forget(each) and not each.request.is_finished()]
        if found and self.begin_again is not None:
            self.begin_again(set(found))
        return found

    def _may_forget(self, waiting: _Waiting) -> bool:
        status = waiting.request.status
        return self.begin_again is not None and (
            status == RequestStatus.WAITING_FOR_REMOTE_KVS or waiting.request.is_finished()
        )


def _blocks(tables: Tables) -> list[int]:
    return [block for table in tables for block in table if block != NULL_BLOCK]
