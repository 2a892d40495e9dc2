"""Advice on L1's size: what a larger L1 would have found that L1 and L2 together did not, and what reads from L2 cost.

L2 may already serve what a larger L1 would find. Without that comparison the advice would be an L1 four times as large for 0.1%
more. But requests wait for reads from L2. So the advice states those seconds, and how many of them a larger L1 would have
spared.

Owns: the sentences. Refuses to know: how the curve is counted (`what_if`), tiers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from kvserver.protocol.status import WhatIfSize, WhatIfStatus

LEAST = 0.01  # of the tokens looked up: what would have brought less is not advised
_NEARLY = 0.8  # of what the best size brings: the smallest size that brings so much is advised


def with_l2(curve: WhatIfStatus, l2_tokens: int, fill_seconds: float) -> WhatIfStatus:
    """The curve of L1 alone beside what L2 gave for the same lookups, with the advice that follows."""
    whole = replace(curve, l2_tokens=l2_tokens, fill_seconds=fill_seconds)
    return replace(whole, advice=_advice(whole))


def _advice(curve: WhatIfStatus) -> str:
    """Empty before the first lookup."""
    sizes = [one.size for one in curve.sizes]
    if not curve.looked_up_tokens or "1" not in sizes:
        return ""
    at = sizes.index("1")
    alone, larger = curve.sizes[at].would_hit_tokens, curve.sizes[at + 1 :]
    found = min(curve.looked_up_tokens, alone + curve.l2_tokens)
    whose = "L1 as it is, with L2," if curve.l2_tokens else "L1 as it is"
    best = _enough(curve, larger, lambda one: one.would_hit_tokens - found)
    if best is None:
        more = f"no larger L1 would have found as much as {LEAST:.0%} more."
        texts = [f"{whose} would have found {_share(found, curve)} of the tokens looked up; {more}"]
    else:
        would = _share(best.would_hit_tokens, curve)
        texts = [f"{_name(best)} would have found {would} of the tokens looked up; {whose} {_share(found, curve)}."]
        if best.size_bytes is None and not curve.l2_tokens:
            texts.append("What no L1 is large enough for, storage behind it (--l2) may have.")
    if curve.l2_tokens:
        texts.append(_cost(curve, alone, larger))
    return " ".join(texts)


def _cost(curve: WhatIfStatus, alone: int, larger: Sequence[WhatIfSize]) -> str:
    def spared(one: WhatIfSize) -> int:
        return min(curve.l2_tokens, one.would_hit_tokens - alone)

    waited = f"For {_share(curve.l2_tokens, curve)} requests waited {curve.fill_seconds:,.1f} s for reads from L2"
    best = _enough(curve, larger, spared)
    if best is None:
        return f"{waited}."
    seconds = curve.fill_seconds * spared(best) / curve.l2_tokens
    return f"{waited}; {_name(best).replace('An', 'an')} would have spared them about {seconds:,.1f} s."


def _enough(curve: WhatIfStatus, larger: Sequence[WhatIfSize], gain: Callable[[WhatIfSize], int]) -> WhatIfSize | None:
    """The smallest size that brings nearly as much as the best one; None if that brings too little."""
    most = max(map(gain, larger), default=0)
    if most < LEAST * curve.looked_up_tokens:
        return None
    return next(one for one in larger if gain(one) >= _NEARLY * most)


def _name(one: WhatIfSize) -> str:
    return "An L1 without limit" if one.size_bytes is None else f"An L1 {one.size} times as large"


def _share(tokens: int, curve: WhatIfStatus) -> str:
    return f"{tokens / curve.looked_up_tokens:.1%}"
