"""Counters of one instance, which outlive it. Refuses to know: who counts."""

from __future__ import annotations

from collections import Counter

import msgspec

from kvserver.cache import MissReason
from kvserver.protocol.status import RequestCounts
from kvserver.telemetry import Benefit


class Counts(RequestCounts):
    missed_tokens: Counter[MissReason] = msgspec.field(default_factory=Counter)
    benefit: Benefit = msgspec.field(default_factory=Benefit)

    def add(self, other: Counts) -> None:
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))
