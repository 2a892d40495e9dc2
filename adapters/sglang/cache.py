"""What SGLang's calls mean for the daemon: one rank's lookups, loads and stores, on the scheduler's thread.

Owns: the link's halves, the numbers of copies, the stores under way in order. Refuses to know: SGLang's objects (`linker`).
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass

from kvserver._native import pack_blocks
from kvserver.adapters.common.dispatcher import Dispatcher
from kvserver.adapters.common.faults import Faults
from kvserver.adapters.common.link import Link
from kvserver.adapters.common.lookups import Lookups
from kvserver.adapters.common.notices import EngineNames
from kvserver.adapters.common.send_queue import SendQueue
from kvserver.adapters.common.specs import LoadSpec, StoreSpec
from kvserver.adapters.common.steps import StepPlan, StepReport
from kvserver.adapters.common.worker import Rank, WorkerHalf
from kvserver.adapters.sglang.hits import RememberedHits
from kvserver.adapters.sglang.loads import load
from kvserver.adapters.sglang.registration import CHUNK_PAGES
from kvserver.adapters.sglang.settings import SGLangSettings
from kvserver.protocol import Durability, Lookup

_SHUT_SECONDS = 1.0


@dataclass
class _Store:
    done: bool | None = None  # None while it is under way; then whether all its pages are in the daemon


class RankCache:
    """REQUIRES: `links` are started: of the scheduler's messages, and of the rank's memory."""

    def __init__(
        self, settings: SGLangSettings, names: EngineNames, links: tuple[Link, Link], rank: Rank, send_queue: SendQueue,
        faults: Faults, page_tokens: int,
    ) -> None:  # fmt: skip
        self.counters: Counter[str] = Counter()
        self._settings, self._names, self._page_tokens = settings, names, page_tokens
        self._link, worker_link = links
        self._dispatcher = Dispatcher(self._link, self.counters, faults)
        self._hits = RememberedHits(Lookups(self._dispatcher, settings, self.counters), self._lookup_message)
        self._half = WorkerHalf(settings, send_queue, faults, rank, worker_link)
        self._numbers = itertools.count(1)
        self._stores: dict[int, _Store] = {}  # by copy id, the oldest first
        self._variant, self._durability = "", Durability.MACHINE

    def next_pass(self) -> None:
        self._hits.next_pass()
        self._collect()

    def lookup(self, request_id: str, keys: list[str]) -> int:
        return self._hits.pages(request_id, keys)

    def _lookup_message(self, request_id: str, keys: bytes) -> Lookup | None:
        names = self._names
        return Lookup(
            names.instance_id, names.incarnation, request_id, CHUNK_PAGES, keys, self._variant,
            durability=self._durability,
        )  # fmt: skip

    def load(self, request_id: str, keys: list[str], pages: list[int]) -> bool:
        self._hits.forget(request_id)
        number = next(self._numbers)
        spec = LoadSpec(
            number, request_id, self._variant, CHUNK_PAGES, bytes.fromhex("".join(keys)), pack_blocks(pages),
            skip_blocks=0, tokens=len(pages) * self._page_tokens, durability=self._durability,
        )  # fmt: skip
        loaded = load(self._half, spec, number, self._settings.load_wait_ms / 1000)
        self._collect()
        return loaded

    def store(self, keys: list[str], pages: list[int]) -> bool:
        """Whether a store is under way; False if there is no daemon to store in."""
        number = next(self._numbers)
        spec = StoreSpec(
            number, f"store-{number}", self._variant, CHUNK_PAGES, bytes.fromhex("".join(keys)), pack_blocks(pages),
            durability=self._durability, step=number,
        )  # fmt: skip
        self._half.begin_step(number)
        plan = StepPlan(stores=[spec])
        self._stores[number] = _Store()
        self._half.start_stores(plan)
        self._half.answer_for_stores(plan)
        self._apply(self._half.take_report())
        if self._stores[number].done is False:
            del self._stores[number]
            return False
        return True

    def stores_ended(self) -> int:
        """How many stores have ended, from the oldest on."""
        self._collect()
        return sum(1 for _ in itertools.takewhile(lambda store: store.done is not None, self._stores.values()))

    def pop_store(self) -> bool:
        """Whether all pages of the oldest store are in the daemon. REQUIRES: it has ended."""
        return bool(self._stores.pop(next(iter(self._stores))).done)

    def _collect(self) -> None:
        self._half.poll(idle=False)
        self._apply(self._half.take_report())

    def _apply(self, report: StepReport | None) -> None:
        if report is None:
            return
        for number in report.ended_stores:
            if number in self._stores:
                self._stores[number].done = number not in report.incomplete_stores

    def reset(self) -> None:
        self._hits.forget_all()
        self._half.start_loads(StepPlan(abort_stores=list(self._stores)))
        self._collect()
        self._stores.clear()

    def close(self) -> None:
        self._half.shut()
        self._dispatcher.close()
        self._link.stop(_SHUT_SECONDS)
