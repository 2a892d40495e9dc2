"""States with speculative decoding, by vLLM's real scheduler: another engine reads the states of accepted tokens, bit for bit."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hybrids import HYBRIDS
from made_up_model import prompt
from modelless import Answer, Engine

from kvserver.adapters.common.specs import ids_of
from kvserver.adapters.vllm.support import vllm_version

pytestmark = pytest.mark.skipif(
    vllm_version() < (0, 32), reason="states with drafts run without cache before vLLM 0.32"
)

CHUNK = 64
STATES = 1  # their object group
QWEN3_NEXT = HYBRIDS["qwen3-next"].options
FEW_BLOCKS = 50  # for some three of the requests below


@dataclass
class Drafts:
    """Numbers of an engine's drafts, by what became of them."""

    accepted: int = 0
    rejected: int = 0


def count_drafts(engine: Engine) -> Drafts:
    """Count from now on, as vLLM's own statistics do."""
    drafts, update = Drafts(), engine.scheduler.make_spec_decoding_stats

    def counted(stats, num_draft_tokens, num_accepted_tokens, *args, **kwargs):
        drafts.accepted += num_accepted_tokens
        drafts.rejected += num_draft_tokens - num_accepted_tokens
        return update(stats, num_draft_tokens, num_accepted_tokens, *args, **kwargs)

    engine.scheduler.make_spec_decoding_stats = counted
    return drafts


def serve_at_random(engine: Engine, seed: int) -> list[Answer]:
    """Requests in too few blocks, until enough were preempted, and enough drafts accepted and rejected."""
    dice, drafts = random.Random(seed), count_drafts(engine)
    answers: list[Answer] = []
    while engine.preemptions < 10 or min(drafts.accepted, drafts.rejected) < 100:
        assert len(answers) < 500
        if sum(answer.finish_reason is None for answer in answers) < 8 and dice.random() < 0.3:
            tokens = prompt(1000 * seed + len(answers), dice.randrange(20, 200))
            answers.append(engine.add(f"r{len(answers)}", tokens, count=dice.choice([3, 40, 120])))
        engine.step()
    engine.run(60)
    return answers


DAILY = [(1, True), (2, False), (3, True), (4, False), (4, True)]
RUNS = [(count, asynchronous, 1) for count, asynchronous in DAILY]
RUNS += [
    pytest.param(count, asynchronous, seed, marks=pytest.mark.long)
    for count in range(1, 5)
    for asynchronous in (True, False)
    for seed in range(2, 8)
]


@pytest.mark.parametrize(("count", "asynchronous", "seed"), RUNS)
def test_what_another_engine_reads_is_the_state_of_the_accepted_tokens(
    make_daemon, make_engine, count, asynchronous, seed
):
    """A step of the reader fails if it begins with another state. The reader rejects other drafts than the writer did."""
    daemon, options = make_daemon(), {**QWEN3_NEXT, "drafts": count, "asynchronous": asynchronous}
    writer = make_engine(daemon, **{**options, "num_blocks": FEW_BLOCKS})
    answers = serve_at_random(writer, seed)
    assert all(answer.right for answer in answers)
    reader = make_engine(daemon, **options)
    turns = [[*answer.prompt, *answer.tokens, 7] for answer in answers]
    read = [reader.generate(f"r{n}", turn, count=3).external for n, turn in enumerate(turns)]
    assert any(read)


def with_mtp(config, caches):
    """vLLM then ends a prompt's steps a block earlier, and leaves the last block out of its own hits."""
    config.speculative_config.method = "mtp"
    assert config.speculative_config.use_eagle()


@pytest.mark.parametrize(("count", "method"), [(1, "mtp"), (4, "mtp"), (4, "ngram")])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_second_turn_goes_on_where_accepted_drafts_ended_a_chunk(
    make_daemon, make_engine, count, method, asynchronous
):
    """vLLM 0.32 keeps no state of a boundary that accepted drafts pass, unless it schedules asynchronously: the last one may be missing.

    A draft layer holds back the last tokens of a step, so a chunk is stored after vLLM has offered its state.
    """
    daemon, options = make_daemon(), {**QWEN3_NEXT, "drafts": count, "asynchronous": asynchronous}
    if method == "mtp":
        options["adjust"] = with_mtp
    writer, reader = make_engine(daemon, **options), make_engine(daemon, **options)
    hits = []
    for n in range(4):
        first = writer.generate(f"r{n}", prompt(n, 40), count=200)
        turn = [*first.prompt, *first.tokens, *prompt(n + 50, 20)]
        hits.append(reader.generate(f"r{n}", turn, count=30).external)
    if asynchronous or count == 1:
        assert hits == [3 * CHUNK] * 4
    assert 3 * CHUNK in hits
    assert all(hit % CHUNK == 0 for hit in hits)


def test_a_block_that_was_given_away_before_its_state_was_offered_is_neither_pinned_nor_stored(
    make_daemon, make_engine
):
    """vLLM frees a boundary's block where accepted drafts go on behind it, and may allocate it in the pass that offers its state.

    Here each offer names a block in which another request decodes. A pin would make vLLM's `_relocate_speculative_block` raise.
    """
    engine = make_engine(make_daemon(), **QWEN3_NEXT, drafts=2)
    manager = engine.scheduler.kv_cache_manager
    take, named = manager.take_boundary_state_offloads, []

    def of_another():
        found = take()
        other = next((row for name, row in engine.batch.rows.items() if name == "other"), None)
        for name in [name for name in found if name != "other"] if other is not None else ():
            found[name] = [(group, other.tables[group][-1], tokens) for group, _, tokens in found[name]]
            named.extend(block for _, block, _ in found[name])
        return found

    manager.take_boundary_state_offloads = of_another
    answers = [engine.add("other", prompt(1, 40), count=150), engine.add("r", prompt(2, 40), count=100)]
    engine.run()
    assert all(answer.right for answer in answers)
    states = [block for store in engine.stores if store.group == STATES for block in ids_of(store)]
    assert named
    assert not set(named) & set(states)
