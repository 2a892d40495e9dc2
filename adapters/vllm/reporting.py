"""Messages of the scheduler half that ask for no KV: who the engine is, what its block pool did, ends of requests, events.

Owns: when each is sent. Refuses to know: stores and loads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from kvserver.adapters.common.announcer import Announcer
from kvserver.adapters.common.dispatcher import Dispatcher
from kvserver.adapters.common.faults import Faults
from kvserver.adapters.common.introduction import Introduction
from kvserver.adapters.common.notices import Notices, Prompt
from kvserver.adapters.common.speed import PrefillSpeed
from kvserver.adapters.vllm.blockpool import PoolHook
from kvserver.adapters.vllm.events import TierEvents
from kvserver.adapters.vllm.facts import EngineFacts
from kvserver.protocol import DescribeScheduler

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent


class Reporting:
    def __init__(
        self, facts: EngineFacts, dispatcher: Dispatcher, pool: PoolHook, describe: Callable[[], DescribeScheduler],
        counters: Counter[str], faults: Faults,
    ) -> None:  # fmt: skip
        self._pool, self._faults = pool, faults
        self._speed = PrefillSpeed()
        self._notices = Notices(dispatcher, facts.names, pool, counters)
        self._announcer = Announcer(dispatcher, facts.names, TierEvents(facts.groups), facts.publishes)
        self._introduction = Introduction(dispatcher, describe)

    def introduce_again(self) -> None:
        self._introduction.again()

    def pass_ended(self, prompt_tokens: int, with_blocks: bool) -> None:
        """Send what a scheduler pass has to send. It computes `prompt_tokens`. `with_blocks`: what the block pool did, too."""
        if with_blocks:
            with self._faults.guarded("reports of blocks"):
                self._notices.send_blocks()
        with self._faults.guarded("introduction"):
            self._introduction.send()
        with self._faults.guarded("question for events"):
            self._announcer.request_events()
        with self._faults.guarded("prefill speed"):
            self._speed.planned(prompt_tokens)

    def step_ended(self) -> None:
        self._speed.ended()

    def drain_events(self) -> Iterable[KVCacheEvent]:
        """Events of the daemon's tiers for vLLM to publish behind the step's own events."""
        return self._announcer.drain_events(self._pool.clears)

    @property
    def has_unsent_records(self) -> bool:
        return self._notices.has_unsent_records

    def request_ended(self, request_id: str, prompt: Prompt, not_loaded: str) -> None:
        self._notices.end_request(request_id, self._speed.tokens_per_second, prompt, not_loaded)
