"""Replays through the real cache find what a plain LRU finds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.properties import examples
from support.traces import lines_of, plain_lru_hits

from kvserver.protocol import ConfigError
from kvserver.replay import default_sizes, read_trace, replay_sizes

# Prompts as paths in a tree of blocks: equal ids have equal prefixes, as hashes that cover the prefix do.
BRANCHES = st.lists(st.lists(st.integers(0, 2), min_size=0, max_size=8), min_size=1, max_size=40)


def prompts_of(paths: list[list[int]]) -> list[list[int]]:
    """An id for each path from the root."""
    ids: dict[tuple[int, ...], int] = {}
    return [[ids.setdefault(tuple(path[:end]), len(ids)) for end in range(1, len(path) + 1)] for path in paths]


def hits_of(prompts: list[list[int]], blocks: int) -> int:
    trace = read_trace(lines_of(prompts), "t")
    (result,) = replay_sizes(trace, [blocks], ["lru"])
    return round(result.hit_rate * trace.blocks)


def test_hits_of_a_short_trace_equal_those_counted_by_hand() -> None:
    # Capacity 4. [1 2 3] is missed. [1 2 4] finds 1 2; 4 is the fourth block. [5 6] evicts the oldest, which are 3 and then 4
    # (last blocks of prompts age first). [1 2 4] finds 1 2. [1 2 3 7 8] finds 1 2 and stores 3 and 7, for 8 there is no space.
    # [1 2 3 7 8] finds 1 2 3 7.
    prompts = [[1, 2, 3], [1, 2, 4], [5, 6], [1, 2, 4], [1, 2, 3, 7, 8], [1, 2, 3, 7, 8]]
    assert [hits_of(prompts[:end], 4) for end in range(1, 7)] == [0, 2, 2, 4, 6, 10]


def test_a_block_behind_a_missing_one_is_no_hit() -> None:
    assert hits_of([[1, 2, 3], [9, 2, 3]], 0) == 0


@examples(200)
@given(BRANCHES, st.integers(0, 12))
def test_replay_finds_what_a_plain_lru_finds(paths: list[list[int]], blocks: int) -> None:
    prompts = prompts_of(paths)
    assert hits_of(prompts, blocks) == plain_lru_hits(prompts, blocks)


@examples(50)
@given(BRANCHES)
def test_unlimited_finds_all_that_was_there_before(paths: list[list[int]]) -> None:
    prompts = prompts_of(paths)
    assert hits_of(prompts, 0) == hits_of(prompts, 10_000) == plain_lru_hits(prompts, 0)


def test_results_are_by_policy_and_size_in_the_order_of_the_arguments() -> None:
    trace = read_trace(lines_of([[1, 2], [1, 2]]), "t")
    found = [(result.policy, result.blocks, result.hit_rate) for result in replay_sizes(trace, [1, 0], ["lru"])]
    assert found == [("lru", 1, 0.25), ("lru", 0, 0.5)]


def test_found_tokens_are_those_of_whole_blocks_and_at_most_the_prompts() -> None:
    lines = [
        b'{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]}\n',
        b'{"timestamp": 1, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]}\n',
        b'{"timestamp": 2, "input_length": 1024, "output_length": 1, "hash_ids": [1, 3]}\n',
    ]
    trace = read_trace(lines, "t")
    assert trace.block_tokens == 512
    (result,) = replay_sizes(trace, [0], ["lru"])
    assert (result.hit_rate, result.token_hit_rate) == (3 / 6, (600 + 512) / 2224)
    recorded = read_trace([line.replace(b"{", b'{"chunk_tokens": 256, ') for line in lines], "t")
    assert recorded.block_tokens == 256, "of a recording the tokens behind the last whole chunk are no part of a block"


def test_default_sizes_grow_and_end_with_unlimited() -> None:
    sizes = default_sizes(read_trace(lines_of([list(range(1000))]), "t"))
    assert sizes == [10, 25, 50, 100, 200, 400, 800, 0]


def test_time_does_not_go_back_and_begins_at_the_first_request() -> None:
    first, second, third = lines_of([[1], [2], [3]], milliseconds=1000)
    trace = read_trace([second, third, first], "t")
    assert [request.seconds for request in trace.requests] == [0.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (b"{", "Input data was truncated"),
        (b"[]", "Expected `object`, got `array`"),
        (b'{"timestamp": 1, "input_length": 1, "output_length": 1}', "missing required field `hash_ids`"),
        (b'{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": ["a"]}', "Expected `int`, got `str`"),
        (b'{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": [-1]}', "Expected `int` >= 0"),
        (b'{"timestamp": -1, "input_length": 1, "output_length": 1, "hash_ids": []}', "Expected `float` >= 0.0"),
        (b'\xff{"timestamp"', "t, line 3"),
    ],
)
def test_a_bad_line_is_named_by_its_number(bad: bytes, why: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_trace([*lines_of([[1]]), b"\n", bad, *lines_of([[2]])], "t")
    assert str(error.value).startswith("t, line 3: ")
    assert why in str(error.value)


@pytest.mark.parametrize("other", [b"7", b"null", b"true", b'["a"]', b'{"b": 1}', b"1e400", b'""'])
def test_a_session_that_is_no_text_is_none(other: bytes) -> None:
    (line,) = lines_of([[1, 2]])
    with_session = line.replace(b"{", b'{"session_id": ' + other + b", ", 1)
    assert read_trace([with_session], "t") == read_trace([line], "t")


def test_a_trace_without_requests_is_refused() -> None:
    with pytest.raises(ConfigError, match="t: no request"):
        read_trace([b"\n"], "t")


def test_a_session_that_a_trace_ends_is_evicted_first() -> None:
    other, ended = list(range(20, 26)), list(range(6))
    lines = lines_of([other, ended, [30, 31, 32, 33], other])
    lines[1] = lines[1].replace(b"{", b'{"session_id": "a", ', 1)
    ends = [lines[0], lines[1].replace(b"{", b'{"ends_session": true, ', 1), *lines[2:]]

    def hits(of: list[bytes]) -> int:
        trace = read_trace(of, "t")
        (result,) = replay_sizes(trace, [14], ["slru"])
        return round(result.hit_rate * trace.blocks)

    assert hits(lines) < len(other), "the last prompt is older than the session's"
    assert hits(ends) == len(other)
