"""The search for a hit's boundary looked again at a whole window for each boundary that another group lacked: with 16,384 chunks, one long
window and a state that was never stored, a lookup took 14 s of the loop's thread, and all engines waited for it."""

from __future__ import annotations

import pytest

from kvserver.cache import Groups
from kvserver.protocol import ObjectGroup

CHUNK = 16
FULL, STATE = ObjectGroup("full", (0,), 16), ObjectGroup("state", (2,), 16)


class Chunks:
    """The chunks of a prompt, of which `ready` has the groups; counts how often one is looked at."""

    def __init__(self, ready: list[int]) -> None:
        self.looks = 0
        self.chunks = [_Chunk(self, bits) for bits in ready]


class _Chunk:
    def __init__(self, of: Chunks, bits: int) -> None:
        self._of, self._bits = of, bits

    @property
    def ready(self) -> int:
        self._of.looks += 1
        return self._bits


@pytest.mark.parametrize("kind", ["window", "local"])
@pytest.mark.parametrize("window_first", [True, False])
@pytest.mark.parametrize("at", [None, 7])
def test_no_chunk_is_looked_at_twice_for_one_group(kind: str, window_first: bool, at: int | None) -> None:
    """`at`: the only chunk with a state."""
    window = ObjectGroup(kind, (1,), 16, tokens=500 * CHUNK)  # type: ignore[arg-type]
    groups = Groups([FULL, *((window, STATE) if window_first else (STATE, window))], 1, CHUNK)
    state = 4 if window_first else 2
    of = Chunks([7 if number == at else 7 - state for number in range(2000)])
    assert groups.boundary(of.chunks) == (0 if at is None else at + 1)
    assert of.looks <= 2 * 2000 + 2
