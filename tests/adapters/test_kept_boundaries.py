"""What is stored of each object group so that requests can go on at the boundaries that are kept."""

from __future__ import annotations

from drawn_groups import GROUPS
from hypothesis import given
from hypothesis import strategies as st
from support.properties import examples

from kvserver.adapters.common.boundaries import Boundaries
from kvserver.protocol import ObjectGroup


@examples(400)
@given(
    GROUPS,
    st.integers(1, 90),
    st.lists(st.integers(1, 40), max_size=8),
    st.integers(0, 60),
    st.integers(0, 12),
    st.integers(0, 4),
)
def test_what_each_kept_boundary_needs_is_stored_and_stays(
    group: ObjectGroup, prompt: int, steps: list[int], generated: int, junction: int, interval: int
) -> None:
    """A prompt in steps, then one token a step: of each boundary that is kept all objects are there in the end."""
    chunk = 8
    boundaries = Boundaries((prompt // chunk, (prompt - 1) // chunk), junction, interval)
    ends = [at for at in [sum(steps[: i + 1]) for i in range(len(steps))] if at < prompt]
    stored: set[int] = set()
    first = 0
    for computed in [*ends, *range(prompt, prompt + generated + 1)]:
        end = computed // chunk
        if end <= first:
            continue
        wanted = boundaries.wanted(group, first, end, chunk)
        assert all(first <= number < end for number in wanted)
        stored -= set(boundaries.superseded(group, end, chunk))
        stored |= set(wanted)
        boundaries.passed(end)
        first = end
    last = (prompt + generated) // chunk
    kept = {prompt // chunk, (prompt - 1) // chunk, junction, last}
    kept |= set(range(interval, last + 1, interval)) if interval else set()
    for boundary in kept:
        if boundary <= last:
            assert set(range(group.first_needed(boundary, chunk), boundary)) <= stored, boundary


def test_of_a_window_nothing_is_stored_that_no_kept_boundary_needs() -> None:
    window = ObjectGroup("window", (0,), 16, tokens=127)
    boundaries = Boundaries((39, 39))
    assert boundaries.wanted(window, 0, 32, 256) == []
    assert boundaries.wanted(window, 32, 39, 256) == [38]
    boundaries.passed(39)
    assert boundaries.wanted(window, 39, 40, 256) == [39]
    boundaries.passed(40)
    assert boundaries.superseded(window, 41, 256) == [39]  # the end of the prompt stays
    assert Boundaries((39, 39), interval=8).wanted(window, 0, 32, 256) == [7, 15, 23, 31]
    assert Boundaries((39, 39), junction=5).wanted(window, 0, 32, 256) == [4]


@examples(400)
@given(
    st.integers(1, 90),
    st.lists(st.integers(1, 40), min_size=1, max_size=8),
    st.integers(0, 60),
    st.integers(0, 12),
    st.integers(0, 4),
    st.booleans(),
)
def test_each_state_that_is_wanted_was_requested_before_it_was_computed(
    prompt: int, most: list[int], generated: int, junction: int, interval: int, late: bool
) -> None:
    """A step ends where it was requested. `late`: steps are scheduled before the token of the one before is known."""
    group, chunk = ObjectGroup("state", (0,), 2), 8
    boundaries = Boundaries((prompt // chunk, (prompt - 1) // chunk), junction, interval)
    computed = first = 0
    known = prompt
    requested = boundaries.next_kept(0, known // chunk) * chunk
    while computed < prompt + generated:
        before, computed = (
            computed,
            min(computed + most[computed % len(most)], known) if computed < prompt else computed + 1,
        )
        if before < requested < computed:
            computed = requested
        end = min(computed, known) // chunk
        wanted = boundaries.wanted(group, first, end, chunk)
        assert wanted in ([], [requested // chunk - 1])
        assert not wanted or requested <= min(computed, known)
        boundaries.passed(end)
        requested = boundaries.next_kept(min(computed, known) // chunk, known // chunk) * chunk
        first = end
        known = max(known, computed + 1 - late)


def test_behind_its_prompt_a_request_that_is_computed_again_stops_once() -> None:
    boundaries = Boundaries((3, 3))
    assert [boundaries.next_kept(chunks, known=9) for chunks in (0, 3, 8, 9)] == [3, 9, 9, 10]
