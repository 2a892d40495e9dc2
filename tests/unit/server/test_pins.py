"""Pins of requests, of sessions and of operators together: random walks beside a plain model of what is protected, and for how long."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from decimal import Decimal
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from support.properties import Dice, examples, walks
from support.turns import repeat

from kvserver.cache import POLICIES, Cache, PagePool, Protection, SessionKey, one_group
from kvserver.protocol import Lookup
from kvserver.server.pins import PinReport, PinRequest, Pins, SessionPinRequest
from kvserver.tiering.storage import NoStorage
from unit.cache.small_cache import PAGE, keys

IDS = {"a": b"a" * 32, "b": b"b" * 32}
PROMPTS = {"a": ["abcde", "abcxy", "mn"], "b": ["ABCDEF", "ABZ", "Q"]}
OTHERS = "0123456789"
NAMES = {keys(name): name for name in {*"".join([*PROMPTS["a"], *PROMPTS["b"]]), *OTHERS}}
MOST, MOST_OF_REQUESTS = 5, 3
WAIT = 600.0  # of a request's pin, for its first chunk


@dataclass
class Plain:
    """A live pin. `seconds`: of a request, whose clock each chunk starts anew."""

    model: str
    deadline: float
    seconds: float = 0.0
    protected: set[str] = field(default_factory=set)
    wanted: list[str] = field(default_factory=list)
    arrived: bool = False


class World:
    """A small L1 of two models, one with a share, its pins, and the plain model of them by id."""

    def __init__(self, policy: str) -> None:
        self.cache = Cache(PagePool(16 * PAGE, PAGE), POLICIES[policy](), {"a": Decimal("0.4")})
        self.cache.protections.fraction = 0.5
        self.bounds = {"a": 3, "b": 5}  # half of 6 pages, and of the other 10
        self.now = 0.0
        self.live: dict[str, Plain] = {}  # the oldest first
        instances = SimpleNamespace(by_id={})
        upkeep = SimpleNamespace(
            cache=self.cache, clock=lambda: self.now, storage=NoStorage(), prefetches=SimpleNamespace(live={}),
            workers=SimpleNamespace(instances=instances),
        )  # fmt: skip
        self.pins = Pins(cast(Any, upkeep))
        self.outcomes: Counter[str] = Counter()

    # ---- the plain model ------------------------------------------------------------------------

    def used(self, model: str) -> set[str]:
        return set().union(*(plain.protected for plain in self.live.values() if plain.model == model))

    def protect(self, plain: Plain, name: str) -> bool:
        used = self.used(plain.model)
        if name not in used and len(used) == self.bounds[plain.model]:
            return False
        plain.protected.add(name)
        return True

    def begin(self, id: str, plain: Plain, names: str, wants: bool) -> bool:
        """Protect the leading ones as long as they fit, and want the others of a request. True if all leading ones fit."""
        there = self.resident(plain.model, names)
        leading = names[: next((place for place, name in enumerate(names) if name not in there), len(names))]
        full = len(self.used(plain.model)) == self.bounds[plain.model]
        self.live[id] = plain
        fits = all(self.protect(plain, name) for name in leading)
        if wants and fits and (leading or not full):
            plain.wanted = list(names[len(leading) :])
        if not (plain.protected or plain.wanted):
            del self.live[id]
        self.arrive(plain.model, [name for name in plain.wanted if name in there])
        return fits

    def arrive(self, model: str, names: list[str]) -> None:
        for name in names:
            for plain in self.live.values():
                if plain.model == model and name in plain.wanted:
                    plain.wanted.remove(name)
                    if self.protect(plain, name):
                        plain.arrived = True
                    else:
                        plain.wanted = []

    # ---- what happens -----------------------------------------------------------------------------

    def resident(self, model: str, names: str) -> str:
        found = self.cache.index.find_chunks(IDS[model], keys(names))
        return "".join(name for name, chunk in zip(names, found, strict=True) if chunk is not None and chunk.ready)

    def store(self, model: str, names: str, session: str = "") -> None:
        before = self.resident(model, names)
        key = SessionKey(IDS[model], b"", session) if session else None
        plan = self.cache.plan_store(IDS[model], one_group(1), keys(names), PAGE, model_name=model, session=key)
        self.cache.finish_store(plan, copied=True)
        there = self.resident(model, names)
        self.arrive(model, [name for name in names if name in there and name not in before])

    def request(self, model: str, names: str, number: str, seconds: float, session: str) -> None:
        """Look the prompt up with a pin, as the request `number`, which may run already."""
        lookup = Lookup("e", "i", number, 1, keys(names), session_id=session, pin_seconds=seconds)
        of_session = SessionKey(IDS[model], b"", session) if session else None
        self.cache.lookup(IDS[model], lookup.keys, ("e", number), self.now + 3, of_session)
        self.live.pop(number, None)
        self.pins.pin_request(IDS[model], model, lookup)
        if len(self.live) < MOST_OF_REQUESTS:
            waits = len(self.resident(model, names)) < len(names)
            self.begin(
                number, Plain(model, self.now + (max(seconds, WAIT) if waits else seconds), seconds), names, True
            )

    def end_request(self, number: str) -> None:
        self.pins.request_ended("e", number)
        self.cache.end_lease(("e", number))
        if number in self.live:
            plain = self.live[number]
            plain.deadline = min(plain.deadline, self.now + plain.seconds)

    def operator(self, model: str, names: str, seconds: float) -> None:
        found = self.pins.begin(PinRequest(IDS[model], model, keys(names), 1, (0,), seconds))
        leading = self.resident(model, names[:1]) != ""
        self.check(found, model, names if leading else "", names, seconds)

    def pin_session(self, model: str, session: str, seconds: float) -> None:
        record = self.cache.sessions.session(SessionKey(IDS[model], b"", session))
        own = "".join(NAMES[chunk.key] for chunk in record.listed if chunk.session is record) if record else ""
        found = self.pins.begin(SessionPinRequest(session, "", model, (), seconds))
        self.check(found, model, own, own, seconds)

    def check(self, found: PinReport, model: str, names: str, all_of_it: str, seconds: float) -> None:
        """Compare an operator's outcome with the model's."""
        self.outcomes[found.outcome] += 1
        if len(self.live) >= MOST:
            assert (found.outcome, found.reason.partition(":")[0]) == ("rejected", "too_many")
        elif not names:
            assert found.outcome == "missing"
        else:
            id = found.id or "rejected"
            fits = self.begin(id, Plain(model, self.now + seconds), names, False)
            protected = self.live[id].protected if id in self.live else set()
            assert found.tokens == len(protected)
            whole = fits and protected == set(all_of_it)
            assert found.outcome == ("accepted" if whole else "clipped" if protected else "rejected")

    def delete(self, id: str) -> None:
        owner = f"request:e/{id}"
        (found,) = [each.id for each in self.pins.all().pins if owner == each.owner or each.id == id]
        assert self.pins.delete(found).outcome == "accepted"
        del self.live[id]

    def clear(self, model: str) -> None:
        self.cache.clear_namespaces(IDS[model])
        self.live = {id: plain for id, plain in self.live.items() if plain.model != model}

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.cache.expire_leases(self.now)
        for plain in self.live.values():
            if plain.arrived and plain.seconds:
                plain.deadline = self.now + plain.seconds
            plain.arrived = False
        self.live = {id: plain for id, plain in self.live.items() if plain.deadline > self.now}

    def forget_lost(self) -> None:
        self.cache.protections.forget_lost(lambda *_: ())
        self.live = {id: plain for id, plain in self.live.items() if plain.protected or plain.wanted}

    def agrees(self) -> None:
        repeat(self.cache.step)
        for each in self.cache.protections:
            plain = self.live[each.owner.removeprefix("request:e/") if each.owner != "operator" else each.id]
            assert {NAMES[chunk.key] for chunk in each.protected} == plain.protected
            assert {NAMES[key] for _, key in each.wanted} == set(plain.wanted)
            assert each.deadline == plain.deadline
        assert len(self.cache.protections) == len(self.live)
        for model, bound in self.bounds.items():
            names = "".join(sorted(self.used(model)))
            assert self.resident(model, names) == names, "a pinned chunk left L1"
            assert len(names) <= bound
        assert self.cache.protections.protected_pages == len(self.used("a")) + len(self.used("b"))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.hypothesis
def test_pins_of_all_owners_together_protect_what_a_plain_model_does_within_the_share(policy: str) -> None:
    outcomes: Counter[str] = Counter()

    @given(steps=walks(80))
    @examples(60)
    def walk(steps: list[Dice]) -> None:
        world = World(policy)
        actions = {
            "store": 20,
            "request": 12,
            "end": 6,
            "operator": 6,
            "session": 4,
            "delete": 4,
            "time": 4,
            "clear": 1,
            "lost": 3,
        }
        for dice in steps:
            model, session = dice.choice("ab"), dice.choice(["", "s", "t"])
            prompt, number, seconds = dice.choice(PROMPTS[model]), dice.choice("123456"), dice.choice([1.0, 5.0, 700.0])
            match dice.choices(list(actions), list(actions.values()))[0]:
                case "store":
                    others = "".join(dice.sample(OTHERS, 4))
                    world.store(model, dice.choice([prompt, prompt[:2], others]), session)
                case "request":
                    world.request(model, prompt, number, seconds, session)
                case "end":
                    world.end_request(number)
                case "operator":
                    world.operator(model, prompt, seconds)
                case "session":
                    world.pin_session(model, session or "s", seconds)
                case "delete" if world.live:
                    world.delete(dice.choice(list(world.live)))
                case "time":
                    world.pass_time(dice.choice([0.5, 2.0, 400.0]))
                case "clear":
                    world.clear(model)
                case "lost":
                    world.forget_lost()
            world.agrees()
        world.cache.end_leases_of("e")
        repeat(world.cache.step)
        world.cache.audit()
        outcomes.update(world.outcomes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvserver.server.pins.MOST_PROTECTIONS", MOST)
        patch.setattr("kvserver.server.pins.MOST_OF_REQUESTS", MOST_OF_REQUESTS)
        walk()
    assert min(outcomes[each] for each in ("accepted", "clipped", "rejected", "missing")) > 10, outcomes


def test_a_session_whose_list_is_being_made_shorter_is_pinned_chunk_by_chunk() -> None:
    """The list names some chunks twice meanwhile."""
    cache = Cache(PagePool(2000 * PAGE, PAGE), POLICIES["lru"]())
    cache.protections.fraction = 0.49
    names = [number.to_bytes(32, "big") for number in range(1000)]
    plan = cache.plan_store(
        IDS["a"], one_group(1), b"".join(names), PAGE, model_name="m", session=SessionKey(IDS["a"], b"", "a")
    )
    cache.finish_store(plan, copied=True)
    for shared in (25, 33):
        cache.lookup(IDS["a"], b"".join(names[:shared]), ("e", "r"), 1.0, SessionKey(IDS["a"], b"", "b"))
        cache.end_lease(("e", "r"))
    session = cache.sessions.session(SessionKey(IDS["a"], b"", "a"))
    assert session is not None
    assert len(set(session.listed)) < len(session.listed), "a pass has not ended"
    protection = Protection("p", "operator", IDS["a"], cache.index.model("m"), 1e9, 0.0)
    assert cache.protect_session(protection, session) == 0
    cache.protections.add(protection, ())
    assert len(set(protection.protected)) == len(protection.protected) == session.chunks == 967
    cache.audit()
