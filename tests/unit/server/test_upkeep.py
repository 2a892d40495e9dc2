"""Turns of the loop: which of them end pins whose chunks are lost."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvserver.cache import POLICIES, Cache, PagePool, Protection, ProtectionEnd
from kvserver.engines import Instances
from kvserver.server.pins import Pins
from kvserver.server.store_waits import StoreWaits
from kvserver.server.upkeep import Upkeep
from unit.cache.small_cache import PAGE, keys

NAMESPACE = b"a" * 32


class Nothing:
    """Stands for all that a turn serves beside pins."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: ()


@pytest.fixture
def tier() -> SimpleNamespace:
    return SimpleNamespace(state="ready")


@pytest.fixture
def upkeep(tier: SimpleNamespace) -> Upkeep:
    cache = Cache(PagePool(10 * PAGE, PAGE), POLICIES["lru"]())
    cache.protections.fraction = 1.0
    protection = Protection("p", "operator", NAMESPACE, cache.index.model("a"), 1e18, 0.0, kept=True)
    cache.protect(protection, b"", lambda _: b"", lambda _: keys("ab"))

    def step() -> bool:
        return False

    def present(*_: object) -> tuple[bytes, ...]:
        return ()  # as while the tier hides what it has, or has nothing

    none: Any = Nothing()
    storage = SimpleNamespace(tiers=SimpleNamespace(local=[tier]), present=present, tick=list, step=step)
    kept_l1 = SimpleNamespace(adopting=False, tick=list, step=step)
    stores = SimpleNamespace(step=list, waiting=0)
    return Upkeep(
        cache=cache, devices=none, tickets=none, stores=cast(Any, stores), loads=none, workers=none,
        resync=cast(Any, SimpleNamespace(step=step)), storage=cast(Any, storage), prefetches=cast(Any, SimpleNamespace(live={}, tick=list)), store_waits=StoreWaits(cache, Instances()),
        kept_l1=cast(Any, kept_l1),
        bus=none, clock=time.monotonic,
    )  # fmt: skip


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("state", ["opening", "unavailable"])
def test_a_pin_waits_while_a_tier_hides_its_objects_before_a_turn_or_after_it(
    upkeep: Upkeep, tier: SimpleNamespace, state: str, kept: bool
) -> None:
    (protection,) = upkeep.cache.protections
    protection.kept = kept

    def step(becomes: str) -> bool:
        tier.state = becomes
        return False

    for before, after in ((state, state), (state, "ready"), ("ready", state)):
        tier.state = before
        upkeep.storage.step = lambda after=after: step(after)  # type: ignore[method-assign]
        upkeep.tick()
        upkeep.step()
        assert len(upkeep.cache.protections) == 1, (before, after)
    tier.state, upkeep.storage.step = "ready", lambda: False  # type: ignore[method-assign]
    upkeep.step()
    assert len(upkeep.cache.protections) == 1, "it looks once a tick"
    upkeep.tick()
    upkeep.step()
    assert upkeep.cache.protections.ended == {ProtectionEnd.NOT_KEPT if kept else ProtectionEnd.LOST_TIER: 1}


def test_the_reason_of_a_pin_after_a_restart_does_not_claim_that_l2_has_it(upkeep: Upkeep) -> None:
    (shown,) = Pins(upkeep).all().pins
    assert shown.reason.startswith("kept: L1 lacks 2 chunks")
