"""One rank's lookups, loads and stores, on the scheduler's thread.

Owns: the halves of the link, the numbers of copies, the stores under way in order. Refuses to know: SGLang's objects (`linker`).
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from dataclasses import asdict

from kvserver._native import pack_blocks
from kvserver.adapters.common.dispatcher import Dispatcher
from kvserver.adapters.common.failed_loads import FailedLoads
from kvserver.adapters.common.faults import Faults
from kvserver.adapters.common.introduction import Introduction
from kvserver.adapters.common.link import Link
from kvserver.adapters.common.lookups import Lookups
from kvserver.adapters.common.notices import EngineNames
from kvserver.adapters.common.send_queue import SendQueue
from kvserver.adapters.common.specs import LoadSpec, StoreSpec
from kvserver.adapters.common.steps import StepPlan
from kvserver.adapters.common.worker import Rank, WorkerHalf
from kvserver.adapters.sglang.budget import Budget
from kvserver.adapters.sglang.epochs import WeightEpochs
from kvserver.adapters.sglang.events import EventsAddress
from kvserver.adapters.sglang.hits import RememberedHits
from kvserver.adapters.sglang.keys import keys_of, packed
from kvserver.adapters.sglang.loads import LoadEnd, load
from kvserver.adapters.sglang.registration import CHUNK_PAGES
from kvserver.adapters.sglang.settings import SGLangSettings
from kvserver.protocol import SGLANG_HASH, DescribeScheduler, HelloReply, Lookup

_SHUT_SECONDS = 1.0


class RankCache:
    """REQUIRES: `links` are started: of the scheduler's messages, and of the rank's memory."""

    def __init__(
        self, settings: SGLangSettings, names: EngineNames, links: tuple[Link, Link], rank: Rank, send_queue: SendQueue,
        faults: Faults, page_tokens: int, events: EventsAddress,
    ) -> None:  # fmt: skip
        self.counters: Counter[str] = Counter()
        self._events = events
        self._names, self._page_tokens, self._faults = names, page_tokens, faults
        self._link, worker_link = links
        self._dispatcher = Dispatcher(self._link, self.counters, faults)
        self._dispatcher.on_session.append(self._begin_session)
        self._introduction = Introduction(self._dispatcher, self._description)
        self._hits = RememberedHits(
            Lookups(self._dispatcher, settings, self.counters, answers_before_fills=True), self._lookup_message
        )
        self._half = WorkerHalf(settings, send_queue, faults, rank, worker_link)
        self._budget = Budget(settings.load_wait_ms / 1000, settings.load_share, page_tokens)
        self._epochs = WeightEpochs(names.incarnation, settings.on_prefix_reset)
        self._failed = FailedLoads()
        self._last_copy = 0
        self._stores: dict[int, bool | None] = {}  # by copy, the oldest first; once it has ended, whether it is whole

    def next_pass(self) -> None:
        for part in (self._introduction.send, self._hits.next_pass, self._budget.pass_ends, self._collect):
            with self._faults.guarded("a scheduler pass"):  # a part that fails keeps no store from its end
                part()

    def _begin_session(self, hello: HelloReply | None) -> None:
        self._failed.begin_session(self._last_copy + 1)

    def _description(self) -> DescribeScheduler:
        return DescribeScheduler(
            **asdict(self._names),
            variant=self._epochs.variant,
            private=self._epochs.private,
            hash_algorithm=SGLANG_HASH,
            hash_block_tokens=self._page_tokens,
            events_endpoint=self._events.endpoint,
            events_replay_endpoint=self._events.replay_endpoint,
            events_topic=self._events.topic,
        )

    # ---- lookups and loads --------------------------------------------------------------------

    def lookup(self, request_id: str, keys: list[str]) -> int:
        """Count the pages that are worth a load, from the first on."""
        pages = self._budget.affordable(self._hits.pages(request_id, keys))
        return self._failed.leading(self._epochs.variant, packed(keys[:pages])) if self._failed else pages

    def _lookup_message(self, request_id: str, keys: bytes) -> Lookup:
        names, epochs = self._names, self._epochs
        return Lookup(
            names.instance_id,
            names.incarnation,
            request_id,
            CHUNK_PAGES,
            keys_of(keys),
            epochs.variant,
            durability=epochs.durability,
        )

    def load(self, request_id: str, keys: list[str], pages: list[int]) -> tuple[int, LoadEnd]:
        """The number of the copy, and its end."""
        self._hits.forget(request_id)
        spec = LoadSpec(
            self._next_copy(), request_id, self._epochs.variant, CHUNK_PAGES, packed(keys), pack_blocks(pages),
            skip_blocks=0, tokens=len(pages) * self._page_tokens, durability=self._epochs.durability,
        )  # fmt: skip
        began = time.monotonic()
        end = load(self._half, spec, self._budget.seconds(len(pages)), self._faults)
        with self._faults.guarded("the end of a load"):
            self._budget.copied(len(pages), time.monotonic() - began)  # of a load that failed: more than was copied
            if end is not LoadEnd.LOADED:
                self._failed.failed(spec)
            self._collect()
        return spec.copy_id, end

    def is_in_flight(self, copy_id: int) -> bool:
        return self._half.is_in_flight(copy_id)

    def batch_begins(self) -> None:
        self._budget.batch_begins()

    # ---- stores -------------------------------------------------------------------------------

    def store(self, keys: list[str], pages: list[int]) -> bool:
        """Begin a store; False if there is no daemon to store in."""
        self._budget.computed(len(pages))
        number = self._next_copy()
        spec = StoreSpec(
            number, f"store-{number}", self._epochs.variant, CHUNK_PAGES, packed(keys), pack_blocks(pages),
            durability=self._epochs.durability, step=number,
        )  # fmt: skip
        self._half.begin_step(number)
        plan = StepPlan(stores=[spec])
        self._half.start_stores(plan)
        if not self._half.is_in_flight(number):
            return False
        self._stores[number] = None
        return True

    def drop_newest_store(self) -> None:
        """Cancel the store that was begun last: another rank has begun none."""
        number = next(reversed(self._stores))
        del self._stores[number]
        self._half.start_loads(StepPlan(abort_stores=[number]))

    def stores_ended(self) -> int:
        """Count the stores that have ended, from the oldest on."""
        return sum(1 for _ in itertools.takewhile(lambda whole: whole is not None, self._stores.values()))

    def pop_store(self) -> bool:
        """Take the oldest store: True if all its pages are in the daemon. REQUIRES: it has ended."""
        return bool(self._stores.pop(next(iter(self._stores))))

    def _collect(self) -> None:
        self._half.poll(idle=False)
        self._half.take_seconds()  # no metrics of SGLang's have them yet
        if (report := self._half.take_report()) is not None:
            incomplete = set(report.incomplete_stores)
            for number in report.ended_stores:
                if number in self._stores:
                    self._stores[number] = number not in incomplete

    def _next_copy(self) -> int:
        self._last_copy += 1
        return self._last_copy

    # ---- lifecycle ----------------------------------------------------------------------------

    def reset(self) -> None:
        """Cancel what is under way: the daemon publishes no store that was cancelled."""
        self._half.start_loads(StepPlan(abort_stores=list(self._stores)))
        self._stores.clear()
        self._hits.forget_all()
        self._epochs.reset()
        self._introduction.again()
        self._collect()

    def weights_updated(self) -> None:
        """Weights are about to change. SGLang keeps the stores under way, which end as incomplete ones."""
        self._half.start_loads(StepPlan(abort_stores=list(self._stores)))
        self._hits.forget_all()
        self._epochs.weights_updated()
        self._introduction.again()
        self._collect()

    def close(self) -> None:
        self._half.shut()
        self._dispatcher.close()
        self._link.stop(_SHUT_SECONDS)
