"""One rank's lookups, loads and stores, on the scheduler's thread.

Owns: the halves of the link, the numbers of copies, the stores under way in order. Refuses to know: SGLang's objects (`linker`).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

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
from kvserver.protocol import MAX_SESSION_ID, SGLANG_HASH, SGLANG_PAIRS_HASH, DescribeScheduler, HelloReply, Lookup

_SHUT_SECONDS = 1.0


@dataclass(frozen=True)
class Part:
    """The part of a copy that one object group has: keys, and a row of the group's pool for each."""

    group: int
    keys: list[str]
    rows: list[int]


@dataclass(eq=False, slots=True)
class _Store:
    open: set[int]  # copies under way
    whole: bool = True


class RankCache:
    """REQUIRES: `links` are started: of the scheduler's messages, and of the rank's memory."""

    def __init__(
        self, settings: SGLangSettings, names: EngineNames, links: tuple[Link, Link], rank: Rank, send_queue: SendQueue,
        faults: Faults, page_tokens: int, events: EventsAddress, groups: int = 1,
        hashes_pairs: bool = False,
    ) -> None:  # fmt: skip
        """`groups`: the number of the engine's object groups; the first is of full attention. `hashes_pairs`: each token with the next."""
        self._groups = groups
        self.counters: Counter[str] = Counter()
        self._events, self._hashes_pairs = events, hashes_pairs
        self._names, self._page_tokens, self._faults = names, page_tokens, faults
        self._link, worker_link = links
        self._dispatcher = Dispatcher(self._link, self.counters, faults)
        self._dispatcher.on_session.append(self._begin_session)
        self._introduction = Introduction(self._dispatcher, self._description)
        self._hits = RememberedHits(
            Lookups(self._dispatcher, settings, self.counters, answers_at_once=True), self._lookup_message
        )
        self._half = WorkerHalf(settings, send_queue, faults, rank, worker_link)
        self._own_work_seconds = settings.load_wait_ms / 1000
        self._budget = Budget(settings.load_wait_ms / 1000, settings.load_share, page_tokens)
        self._tenant = settings.tenant
        self._epochs = WeightEpochs(names.incarnation, settings.on_prefix_reset)
        self._failed = FailedLoads()
        self._last_copy = 0
        self._stores: list[_Store] = []  # the oldest first

    def next_pass(self) -> None:
        for part in (self._introduction.send, self._hits.next_pass, self._budget.pass_ends, self._collect):
            with self._faults.guarded("a scheduler pass"):  # a part that fails keeps no store from its end
                part()

    def _begin_session(self, hello: HelloReply | None) -> None:
        self._failed.begin_session(self._last_copy + 1)
        self._hits.forget_all()

    def _description(self) -> DescribeScheduler:
        return DescribeScheduler(
            **asdict(self._names),
            variant=self._epochs.variant,
            private=self._epochs.private,
            durability=self._epochs.durability,
            hash_algorithm=SGLANG_PAIRS_HASH if self._hashes_pairs else SGLANG_HASH,
            hash_block_tokens=self._page_tokens,
            events_endpoint=self._events.endpoint,
            events_replay_endpoint=self._events.replay_endpoint,
            events_topic=self._events.topic,
        )

    # ---- lookups and loads --------------------------------------------------------------------

    def lookup(self, request_id: str, keys: list[str]) -> Sequence[int]:
        """The numbers of pages, from the first on, that are worth a load and can be loaded. Ascending."""
        if self._groups == 1:
            return range(1, self.longest(request_id, keys) + 1)
        found = self._hits.boundaries(request_id, keys)
        most = self._worth_loading(keys, found[-1]) if found else 0
        return [pages for pages in found if pages <= most]

    def longest(self, request_id: str, keys: list[str]) -> int:
        """The greatest number of lookup(), 0 if it has none."""
        if self._groups == 1:
            return self._worth_loading(keys, self._hits.pages(request_id, keys))
        return max(self.lookup(request_id, keys), default=0)

    def _worth_loading(self, keys: list[str], pages: int) -> int:
        pages = self._budget.affordable(pages)
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
            boundaries=self._groups > 1,
            tenant=self._tenant,
        )

    def load(self, request_id: str, parts: list[Part]) -> tuple[list[int], LoadEnd]:
        """The numbers of the copies, and their end. REQUIRES: the first part is of full attention."""
        self._hits.forget(request_id)
        pages = len(parts[0].rows)
        specs = [
            LoadSpec(
                self._next_copy(), request_id, self._epochs.variant, CHUNK_PAGES, packed(part.keys),
                pack_blocks(part.rows), skip_blocks=0, group=part.group, tokens=pages * self._page_tokens,
                copies=len(parts), durability=self._epochs.durability,
            )
            for part in parts
        ]  # fmt: skip
        end, seconds = load(self._half, specs, self._budget.seconds(pages), self._own_work_seconds, self._faults)
        with self._faults.guarded("the end of a load"):
            self._budget.copied(pages, seconds)  # of a load that was too slow: more pages than were copied
            if end < LoadEnd.NOT_BEGUN:
                for spec in specs:
                    self._failed.failed(spec)
            self._collect()
        return [spec.copy_id for spec in specs], end

    def is_in_flight(self, copy_id: int) -> bool:
        return self._half.is_in_flight(copy_id)

    def batch_begins(self) -> None:
        self._budget.batch_begins()

    # ---- stores -------------------------------------------------------------------------------

    def store(self, parts: list[Part], session_id: str = "") -> bool:
        """Begin a store; False if there is no daemon to store in. SGLang states no salt: requests of all salts with one name are one session."""
        self._budget.computed(len(parts[0].rows))
        numbers = [self._next_copy() for _ in parts]
        specs = [
            StoreSpec(
                number, f"store-{numbers[0]}", self._epochs.variant, CHUNK_PAGES, packed(part.keys),
                pack_blocks(part.rows), group=part.group, durability=self._epochs.durability, step=numbers[0],
                session_id=session_id if len(session_id) <= MAX_SESSION_ID else "", tenant=self._tenant,
            )
            for number, part in zip(numbers, parts, strict=True)
        ]  # fmt: skip
        self._half.begin_step(numbers[0])
        self._half.start_stores(StepPlan(stores=specs))
        begun = {number for number in numbers if self._half.is_in_flight(number)}
        if len(begun) < len(numbers):
            self._cancel(begun)
            return False
        self._stores.append(_Store(begun))
        return True

    def drop_newest_store(self) -> None:
        """Cancel the store that was begun last: another rank has begun none."""
        self._cancel(self._stores.pop().open)

    def _cancel(self, copies: Iterable[int]) -> None:
        self._half.start_loads(StepPlan(abort_stores=list(copies)))

    def _cancel_stores(self) -> None:
        self._cancel(number for store in self._stores for number in store.open)

    def stores_ended(self) -> int:
        """Count the stores that have ended, from the oldest on."""
        return sum(1 for _ in itertools.takewhile(lambda store: not store.open, self._stores))

    def pop_store(self) -> bool:
        """Take the oldest store: True if all its objects are in the daemon. REQUIRES: it has ended."""
        return self._stores.pop(0).whole

    def _collect(self) -> None:
        self._half.poll(idle=False)
        self._half.take_seconds()  # no metrics of SGLang's have them yet
        if (report := self._half.take_report()) is not None:
            ended, incomplete = set(report.ended_stores), set(report.incomplete_stores)
            for store in self._stores:
                store.whole = store.whole and not store.open & incomplete
                store.open -= ended

    def _next_copy(self) -> int:
        self._last_copy += 1
        return self._last_copy

    # ---- lifecycle ----------------------------------------------------------------------------

    def reset(self) -> None:
        """Cancel what is under way: the daemon publishes nothing that it copies after that."""
        self._cancel_stores()
        self._stores.clear()
        self._hits.forget_all()
        self._epochs.reset()
        self._introduction.again()
        self._collect()

    def weights_updated(self) -> None:
        """Weights are about to change. SGLang keeps the stores under way, which end as incomplete ones."""
        self._cancel_stores()
        self._hits.forget_all()
        self._epochs.weights_updated()
        self._introduction.again()
        self._collect()

    def close(self) -> None:
        self._half.shut()
        self._dispatcher.close()
        self._link.stop(_SHUT_SECONDS)
