"""Exceptions that are kept from the engine.

Owns: their counts, and that each kind is logged once. Refuses to know: what follows from a fault.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

from kvserver.adapters.common.log import log


class Faults:
    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()  # by "place: kind"

    def count(self, where: str, error: Exception) -> None:
        """REQUIRES: called while `error` is handled."""
        kind = f"{where}: {type(error).__name__}"
        self.counts[kind] += 1
        if self.counts[kind] == 1:
            log.exception("kvserver connector: a fault in %s; further ones are only counted", where)

    @contextlib.contextmanager
    def guarded(self, where: str) -> Iterator[None]:
        """A fault in the block is counted, and the caller goes on behind the block."""
        try:
            yield
        except Exception as error:
            self.count(where, error)
