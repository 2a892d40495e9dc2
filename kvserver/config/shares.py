"""Parts of L1 that are kept for models and tenants: `--share MODEL=FRACTION`, `--share tenant:NAME=FRACTION`.

Owns: their form, and that they fit into L1 together. Refuses to know: what an eviction does with them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal

import msgspec

from kvserver.protocol import OTHER, TENANT, TENANT_PREFIX, Name

MOST_SHARES = 64  # an eviction looks at each


def parse_shares(texts: Sequence[str]) -> dict[str, Decimal]:
    """Fractions of L1 by model name, or tenant:NAME. ValueError states which one is bad, and why."""
    shares: dict[str, Decimal] = {}
    for text in texts:
        name, _, fraction = text.rpartition("=")
        if not re.fullmatch(r"[0-9]+(\.[0-9]+)?|\.[0-9]+", fraction) or not name:
            raise ValueError(
                f"{text!r} is no share; write MODEL=FRACTION, for example llama=0.3, or tenant:NAME=FRACTION"
            )
        _check_name(name)
        if name in shares:
            raise ValueError(f"{name!r} has two shares")
        if not 0 < (share := Decimal(fraction)) <= 1:
            raise ValueError(f"the share of {name!r} is {fraction}; it is more than 0 and at most 1")
        shares[name] = share
    if (total := sum(shares.values())) > 1:
        raise ValueError(f"the shares are {total} of L1 together; they are at most 1")
    if len(shares) > MOST_SHARES:
        raise ValueError(f"{len(shares)} models and tenants have shares; at most {MOST_SHARES} can")
    return shares


def _check_name(name: str) -> None:
    """Check a model's name as a registration does, where it becomes the label of metrics; a tenant's as an adapter does."""
    if name.startswith(TENANT_PREFIX):
        if name == TENANT_PREFIX or not re.fullmatch(TENANT, name.removeprefix(TENANT_PREFIX)):
            raise ValueError(
                f"{name[:80]!r} names no tenant: its name is 1 to 64 letters, digits, dots, hyphens and underscores"
            )
        return
    try:
        msgspec.convert(name, Name)
    except msgspec.ValidationError:
        raise ValueError(f"no engine serves a model under the name {name[:20]!r}: it is too long") from None
    if name == OTHER:
        raise ValueError(f"{OTHER} is not one model")
