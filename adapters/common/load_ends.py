"""Ends of requests' loads. A load may be several copies.

Owns: the loads under way, ended or failed, until the engine collects the result. Refuses to know: copies' states (`endings`).
"""

from __future__ import annotations

from kvserver.adapters.common.specs import LoadSpec, ids_of


class LoadEnds:
    def __init__(self, fails_requests: bool) -> None:
        """`fails_requests`: a failed load fails its whole request; else the blocks that failed."""
        self._fails_requests = fails_requests
        self._parts: dict[str, tuple[int, bool]] = {}  # of loads under way, by request: (copies that ended, one failed)
        self._finished: set[str] = set()
        self._failed: set[str] = set()  # of those, failed as a whole
        self._invalid: set[int] = set()

    def part_ended(self, spec: LoadSpec, *, failed: bool) -> bool | None:
        """Note the end of one copy of a request's load. Returns None while other copies of it run, then whether one of them failed."""
        ended, any_failed = self._parts.pop(spec.request_id, (0, False))
        ended, any_failed = ended + 1, any_failed or failed
        if failed and not self._fails_requests:
            self._invalid.update(ids_of(spec))
        if ended < spec.copies:
            self._parts[spec.request_id] = ended, any_failed
            return None
        if any_failed and self._fails_requests:
            self._failed.add(spec.request_id)
        self._finished.add(spec.request_id)
        return any_failed

    def take_finished(self) -> tuple[set[str], set[str]]:
        """(requests whose loads are over, those of them that failed as a whole); each exactly once."""
        finished, failed = self._finished, self._failed
        self._finished, self._failed = set(), set()
        return finished, failed

    def take_invalid_blocks(self) -> set[int]:
        invalid, self._invalid = self._invalid, set()
        return invalid
