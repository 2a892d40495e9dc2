"""The longest turn of the server's loop, by what happens and how many chunks L1 holds.

    python bench/turns.py [--chunks 50000 200000]

The server's own parts in this process, without sockets: a turn handles what happened, at most one message, and a slice
of what was put off. Columns: milliseconds of processor time of the longest turn, turns until nothing was left to do.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from collections.abc import Callable
from decimal import Decimal

from common import table

from kvserver.cache import POLICIES, Cache, PagePool, StorePlan, one_group
from kvserver.protocol import KEY_BYTES, MAX_CHUNKS
from kvserver.server.stores import STEPS_PER_TURN

NAMESPACE, PAGE, KEYS, FOREVER = b"n" * 32, 4096, 512, 1e9


class Loop:
    """A full L1 of so many chunks of one model, one page each, and the turns that end its work. 9 of 10 may be its share."""

    def __init__(self, chunks: int, policy: str, share: bool = False) -> None:
        shares = {"quiet": Decimal("0.9")} if share else {}
        self.cache = Cache(PagePool(chunks * PAGE, PAGE), POLICIES[policy](), shares)
        source = random.Random(0)
        self.messages = [source.randbytes(KEY_BYTES * min(KEYS, chunks - first)) for first in range(0, chunks, KEYS)]
        self.longest = 0.0
        self.turns = 0
        for keys in self.messages:
            plan = self.cache.plan_store(NAMESPACE, one_group(1), keys, PAGE, model_name="quiet")
            self.cache.finish_store(plan, copied=True)

    def turn(self, what: Callable[[], object]) -> None:
        began = time.thread_time()
        what()
        self.longest = max(self.longest, time.thread_time() - began)
        self.turns += 1

    def lease_all(self) -> None:
        for number, keys in enumerate(self.messages):
            found = self.cache.lookup(NAMESPACE, keys, ("engine", str(number)), number / 1e6)
            assert found.hit_chunks == found.chunks

    def store(self, pages: int = 1) -> StorePlan:
        plans: list[StorePlan] = []
        key = random.randbytes(KEY_BYTES)
        self.turn(
            lambda: plans.append(
                self.cache.plan_store(b"o" * 32, one_group(1), key, pages * PAGE, steps=STEPS_PER_TURN)
            )
        )
        while not plans[0].complete:
            self.turn(lambda: self.cache.extend_plan(plans[0], STEPS_PER_TURN))
        self.cache.finish_store(plans[0], copied=True)
        return plans[0]

    def rest(self) -> None:
        more = [True]
        while more[-1]:
            self.turn(lambda: more.append(self.cache.step()))


def all_leased(loop: Loop) -> None:
    loop.lease_all()
    assert loop.store().no_space == 1


def all_used_since(loop: Loop) -> None:
    loop.lease_all()
    for number in range(len(loop.messages)):
        loop.turn(lambda: loop.cache.end_lease(("engine", str(number))))  # noqa: B023
    assert loop.store().no_space == 0


def engine_departs(loop: Loop) -> None:
    loop.lease_all()
    loop.turn(lambda: loop.cache.end_leases_of("engine"))
    loop.rest()
    assert not loop.cache.lease_count


def leases_expire(loop: Loop) -> None:
    loop.lease_all()
    loop.turn(lambda: loop.cache.expire_leases(FOREVER))
    loop.rest()
    assert not loop.cache.lease_count


def one_evicts_nearly_all(loop: Loop) -> None:
    assert loop.store(loop.cache.pool.pages * 9 // 10).no_space == 0


def all_spared(loop: Loop) -> None:
    """The last store of another model finds nothing but the first model's share, and its own chunks behind it."""
    for _ in range(loop.cache.pool.pages // 10 + 1):
        assert loop.store().no_space == 0
    assert loop.cache.index.models["quiet"].pages == loop.cache.pool.pages * 9 // 10


def clear(loop: Loop) -> None:
    loop.turn(loop.cache.clear_namespaces)
    loop.rest()
    assert not loop.cache.pool.used_pages


def all_missed(loop: Loop) -> None:
    """Lookups of KEYS chunks, and of as many as one may name, all of them evicted."""
    evict = loop.cache.plan_store(b"o" * 32, one_group(1), bytes(KEY_BYTES), loop.cache.pool.pages * 9 // 10 * PAGE)
    loop.cache.finish_store(evict, copied=True)
    for keys in (*loop.messages[:100], b"".join(loop.messages)[: MAX_CHUNKS * KEY_BYTES]):
        loop.turn(lambda: loop.cache.lookup(NAMESPACE, keys, ("engine", "missed"), 1e9))  # noqa: B023


CASES = [
    all_leased,
    all_used_since,
    engine_departs,
    leases_expire,
    one_evicts_nearly_all,
    all_spared,
    clear,
    all_missed,
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, nargs="+", default=[50_000, 200_000])
    parser.add_argument("--policy", default="slru", choices=POLICIES)
    options = parser.parse_args()
    gc.disable()  # as the server does
    rows: list[list[object]] = []
    for case in CASES:
        row: list[object] = [case.__name__.replace("_", " ")]
        for chunks in options.chunks:
            loop = Loop(chunks, options.policy, share=case is all_spared)
            case(loop)
            row += [loop.longest * 1e3, loop.turns]
        rows.append(row)
    print(table(["what", *[column for n in options.chunks for column in (f"{n}: ms", "turns")]], rows))


if __name__ == "__main__":
    main()
