"""`kvserver explain` advised a smaller --chunk-tokens with each of the worst requests, though their last blocks are stored one by one
since there are tails, and stated that prompts shorter than a chunk are not looked up. No advice stated what it would bring."""

from __future__ import annotations

import pytest
from support.registration import registration

from kvserver.cache import LookupOutcome, MissReason
from kvserver.events import LookupEnded, NamespaceFormed, RequestEnded
from kvserver.protocol import ObjectGroup
from kvserver.telemetry import Explain, Facts, advice, verdict

OF = ("engine", "m", "r")
FULL = (ObjectGroup("full", (0,), 16),)
HYBRID = (ObjectGroup("full", (0,), 16), ObjectGroup("local", (1,), 32, tokens=64))


def engine(tails: bool = True, groups: tuple[ObjectGroup, ...] = FULL) -> Explain:
    explain = Explain()
    spec = registration(groups=groups, block_tokens=16, chunk_blocks=16, tails=tails)
    explain.handle(NamespaceFormed(0, "engine", "m", bytes(32), (spec,)))
    return explain


def looked_up(
    explain: Explain, prompt: int, hits: int = 4, missed: tuple[tuple[MissReason, int], ...] = (), loaded: int = 1024
) -> Facts:
    outcome = LookupOutcome(hits + sum(count for _, count in missed), hits, missed)
    explain.handle(LookupEnded(1, *OF, 0, b"", outcome, 256, bytes(32), prompt, block_tokens=16))
    return ended(explain, prompt, loaded)


def ended(explain: Explain, prompt: int, loaded: int = 0) -> Facts:
    explain.handle(RequestEnded(2, *OF, prompt_tokens=prompt, loaded_tokens=loaded))
    return explain.find_requests("r", 1)[0]


@pytest.mark.parametrize("left", [40, 8])
def test_no_smaller_chunk_is_advised_where_single_blocks_are_stored(left: int) -> None:
    facts = looked_up(engine(), 1024 + left)
    assert advice(facts) == []
    why = "are no whole block of 16" if left == 8 else "behind the last whole chunk, were never stored here"
    assert f"the last {left} tokens" in verdict(facts)
    assert why in verdict(facts)


@pytest.mark.parametrize(("groups", "left", "saves"), [(FULL, 40, 32), (FULL, 32, 31), (HYBRID, 70, 64)])
def test_a_smaller_chunk_is_advised_with_the_tokens_of_whole_blocks(
    groups: tuple[ObjectGroup, ...], left: int, saves: int
) -> None:
    (text,) = advice(looked_up(engine(tails=False, groups=groups), 1024 + left))
    assert "--chunk-tokens" in text
    assert text.endswith(f"At most {saves} of this request's tokens would have been saved."), "the last one never is"


@pytest.mark.parametrize(("groups", "left"), [(FULL, 8), (HYBRID, 24)])
def test_a_smaller_chunk_is_not_advised_for_less_than_a_block_of_each_group(
    groups: tuple[ObjectGroup, ...], left: int
) -> None:
    assert advice(looked_up(engine(tails=False, groups=groups), 1024 + left)) == []


def test_a_smaller_chunk_is_not_advised_behind_a_chunk_that_was_missed() -> None:
    facts = looked_up(engine(tails=False), 1064, hits=2, missed=((MissReason.EVICTED, 2),), loaded=512)
    (text,) = advice(facts)
    assert "--l1-size" in text
    assert text.endswith("At most 512 of this request's tokens would have been saved.")


def test_the_engines_own_tokens_are_not_saved_again() -> None:
    explain = engine()
    outcome = LookupOutcome(4, 0, ((MissReason.EVICTED, 4),))
    explain.handle(LookupEnded(1, *OF, 0, b"", outcome, 256, bytes(32), 1024, block_tokens=16))
    explain.handle(RequestEnded(2, *OF, prompt_tokens=1024, local_tokens=1008))
    (text,) = advice(explain.find_requests("r", 1)[0])
    assert text.endswith("At most 15 of this request's tokens would have been saved.")


@pytest.mark.parametrize(
    ("tails", "prompt", "advised"), [(True, 8, []), (False, 8, []), (False, 100, ["--chunk-tokens"])]
)
def test_a_prompt_without_a_whole_block_is_not_looked_up(tails: bool, prompt: int, advised: list[str]) -> None:
    facts = ended(engine(tails=tails), prompt)
    assert (facts["outcome"], facts["missed_tokens"]) == ("no_lookup", {"partial_chunk": prompt})
    texts = advice(facts)
    assert len(texts) == len(advised)
    assert all(word in text for word, text in zip(advised, texts, strict=True))


def test_a_prompt_shorter_than_a_chunk_is_looked_up_where_single_blocks_are_stored() -> None:
    facts = ended(engine(), 100)
    (text,) = advice(facts)
    assert facts["missing"] is None
    assert "shorter than a chunk" not in text
    assert "breaker" in text


def test_a_load_of_nothing_states_what_it_would_have_saved() -> None:
    texts = advice(looked_up(engine(), 1064, loaded=0))
    assert texts[0].endswith("At most 1,024 of this request's tokens would have been saved.")
