"""Wishes of a request for the cache: the names with `kvserver.` in its `kv_transfer_params`.

An invalid value counts as absent, and is counted: a client's mistake must not cost it the answer. Other names in
`kv_transfer_params` belong to other connectors.

Owns: the form and meaning of the wishes.
"""

from __future__ import annotations

import logging
import re
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvserver.protocol import MAX_PIN_SECONDS, MAX_SESSION_ID, TENANT

log = logging.getLogger("vllm.kvserver")

_PREFIX = "kvserver."
_LONGEST_NAME = 512  # of an engine, as the protocol has it
_TIERS = {(): (0, False), ("l1",): (sys.maxsize, False), ("l1", "l2"): (sys.maxsize, True)}


@dataclass(frozen=True, slots=True)
class Wishes:
    stores: bool = True  # its KV may be stored
    most_tokens: int = sys.maxsize  # of its prompt, from the first one on, that may be loaded
    waits_for_storage: bool = True  # for what the daemon has in L2 alone
    session_id: str = ""  # for vLLM before 0.32, whose requests have none
    pin_seconds: float = 0.0  # how long its prompt should stay in L1
    prefilled_tokens: int = 0  # of its prompt, which another engine has computed and stores
    prefilled_by: str = ""  # that engine
    tenant: str = ""  # to whom its chunks belong; "": the engine's


NONE = Wishes()


def wishes_of(params: object, counters: Counter[str]) -> Wishes:
    """Wishes in a request's `kv_transfer_params`."""
    if not isinstance(params, Mapping):
        return NONE
    wishes = NONE
    for name, value in params.items():
        if isinstance(name, str) and name.startswith(_PREFIX):
            wishes = _with(wishes, name.removeprefix(_PREFIX), value) or _refused(wishes, name, counters)
    return wishes


def hinted(wishes: Wishes, hints: Any, counters: Counter[str]) -> Wishes:
    """`wishes` with those in a request's `kv_hints`, which programs give to vLLM 0.32 and later. Other actions are counted.

    `kvserver.prefetch` needs no act of its own: the request's lookup begins to read what L2 alone has.
    """
    for action in getattr(hints, "actions", None) or ():
        named = action.action_type, action.action_version
        if named == ("kvserver.pin", "1.0"):
            seconds = action.payload.get("ttl_seconds")
            wishes = _with(wishes, "pin_seconds", seconds) or _refused(wishes, "kv_hints: kvserver.pin", counters)
        else:
            counters["unknown_hints"] += named != ("kvserver.prefetch", "1.0")
    return wishes


class TrustedWishes:
    """Pins and tenants are wished as the requests state, or counted as refused. `trusts`, and the engine's own `tenant`: of its configuration."""

    def __init__(self, trusts: bool, tenant: str, counters: Counter[str]) -> None:
        self._trusts, self._tenant, self._counters = trusts, tenant, counters

    def allowed(self, wishes: Wishes) -> Wishes:
        if wishes.pin_seconds and not self._trusts:
            self._refuse("pin")
            wishes = replace(wishes, pin_seconds=0.0)
        if wishes.tenant == self._tenant or (wishes.tenant and self._trusts):
            return wishes
        if wishes.tenant:
            self._refuse("tenant")
        return replace(wishes, tenant=self._tenant)

    def _refuse(self, what: str) -> None:
        self._counters[f"refused_{what}s"] += 1
        if self._counters[f"refused_{what}s"] == 1:
            log.warning(
                "a request states a %s, and kvserver.trust_request_pins is not set. Further ones are only counted", what
            )


def not_pinned(asked: Wishes, allowed: Wishes) -> str:
    """The answer's word for a pin that no lookup has requested yet; "" if none is wished."""
    if not asked.pin_seconds:
        return ""
    return "refused: no_lookup" if allowed.pin_seconds else "refused: not_trusted"


def wishes_of_turn(parameters: Any, before: Wishes, counters: Counter[str]) -> Wishes:
    """Wishes of a streaming session's new turn, by its sampling parameters: vLLM keeps the first turn's `kv_transfer_params`.

    A turn that states none keeps those of the previous turn.
    """
    params = (getattr(parameters, "extra_args", None) or {}).get("kv_transfer_params")
    return before if params is None else wishes_of(params, counters)


def _with(wishes: Wishes, name: str, value: object) -> Wishes | None:
    """`wishes` with one more; None if the name or the value has no meaning."""
    if name == "no_store" and isinstance(value, bool):
        return replace(wishes, stores=not value)
    if name == "max_load_tokens" and isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return replace(wishes, most_tokens=min(value, wishes.most_tokens))
    if name == "session_id" and isinstance(value, str) and len(value) <= MAX_SESSION_ID:
        return replace(wishes, session_id=value)
    if name == "pin_seconds" and isinstance(value, (int, float)) and not isinstance(value, bool):
        return replace(wishes, pin_seconds=float(value)) if 0 < value <= MAX_PIN_SECONDS else None
    if name == "tenant" and isinstance(value, str) and value and re.fullmatch(TENANT, value):
        return replace(wishes, tenant=value)
    if name == "pin":  # of an earlier answer, which a router may pass on
        return wishes
    if name == "prefilled_tokens" and isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31:
        return replace(wishes, prefilled_tokens=value)
    if name == "prefilled_by" and isinstance(value, str) and len(value) <= _LONGEST_NAME:
        return replace(wishes, prefilled_by=value)
    if name == "tiers" and isinstance(value, (list, tuple)) and all(isinstance(tier, str) for tier in value):
        found = _TIERS.get(tuple(sorted(value)))
        if found is not None:
            return replace(wishes, most_tokens=min(found[0], wishes.most_tokens), waits_for_storage=found[1])
    return None


def _refused(wishes: Wishes, name: str, counters: Counter[str]) -> Wishes:
    counters["bad_wishes"] += 1
    if counters["bad_wishes"] == 1:
        log.warning(
            "kv_transfer_params of a request: %.100r has no such value, and is ignored; known are %sno_store (true or false), "
            "%smax_load_tokens (0 or more), %stiers ([], ['l1'] or ['l1', 'l2']), %spin_seconds (up to a week), %ssession_id (up to 256 characters), "
            "%stenant (up to 64 letters, digits, dots, hyphens and underscores), and %sprefilled_tokens and %sprefilled_by of another engine's answer. "
            "Further ones are only counted",
            name, *[_PREFIX] * 8,
        )  # fmt: skip
    return wishes
