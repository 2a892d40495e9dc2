"""Single blocks behind the last full chunk: what one engine stores another one loads, wherever a prompt or a request ended.

`Engine.generate` asserts the tokens, and every step that no request attends to a wrong byte.
"""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest
from made_up_model import BLOCK, continuation, prompt
from reconnect import connected
from support.daemon import wait_until

from kvserver.adapters.common.specs import StoreSpec, ids_of
from kvserver.adapters.common.steps import StepPlan
from kvserver.adapters.vllm.groups import object_groups
from kvserver.adapters.vllm.load_plans import LoadPlanner

CHUNK = 64  # tokens: the test daemon's chunk_tokens
PER_CHUNK = CHUNK // BLOCK


@pytest.fixture(params=["async", "sync", "async-V2"])
def how(request):
    """Which scheduler. For vLLM's second model runner, resumed requests come as new ones."""
    return {"asynchronous": request.param != "sync", "runner": 2 if "V2" in request.param else 1}


@pytest.fixture
def daemon(make_daemon):
    return make_daemon(tails="on")


def whole(tokens: int) -> int:
    """Of so many tokens those of whole blocks."""
    return tokens // BLOCK * BLOCK


def counts(daemon) -> dict[str, Any]:
    """Of all instances together."""
    rows = [row["requests"] for row in daemon.status()["instances"]]
    return {name: sum(row[name] for row in rows) for name in ("lookups", "hits", "lookup_tokens", "hit_tokens")}


@pytest.mark.parametrize("length", [BLOCK + 1, CHUNK + 5, 3 * CHUNK - 1, 3 * CHUNK + 48])
def test_a_prompt_is_found_up_to_its_last_whole_block(daemon, make_engine, how, length):
    tokens = prompt(1, length)
    make_engine(daemon, **how).generate("cold", tokens, count=1)
    warm = make_engine(daemon, **how)
    answer = warm.generate("warm", tokens)
    assert (answer.local, answer.external) == (0, min(whole(length), length - 1))
    assert warm.received == ["warm"]
    daemon.wait_for_accounting(tickets=0, pins=0, leases=0)


@pytest.mark.parametrize(
    ("length", "count"), [(20, 3), (CHUNK - 3, 30), (2 * CHUNK + 9, CHUNK + 21), (2 * CHUNK + 40, 30)]
)
def test_the_next_turn_of_a_chat_finds_where_the_last_one_ended(daemon, make_engine, how, length, count):
    """Its prompt begins with the last prompt and answer, whose end lies inside a chunk of it: at a chunk that it lacks."""
    first = prompt(2, length)
    make_engine(daemon, **how).generate("turn 1", first, count=count)
    ended = first + continuation(first, count)
    second = ended + prompt(3, CHUNK + 7)
    warm = make_engine(daemon, **how)
    answer = warm.generate("turn 2", second)
    assert answer.external == whole(len(ended) - 1), "the KV of the last token is not computed"
    third = second + continuation(second, 4) + prompt(4, 5)
    assert make_engine(daemon, **how).generate("turn 3", third).external == whole(len(second) + 3)
    assert counts(daemon)["lookups"] == 3, "a lookup in two steps is one"


def test_the_end_of_a_prompt_is_found_after_its_answer_filled_the_chunk(daemon, make_engine, how):
    """As when the same prompt is sampled again: its last, partial block was never hashed by itself."""
    tokens = prompt(41, 2 * CHUNK - 1)
    make_engine(daemon, **how).generate("one", tokens, count=CHUNK + 5)
    assert make_engine(daemon, **how).generate("two", tokens).external == 2 * CHUNK - BLOCK


def test_prompts_that_part_inside_a_chunk_share_its_blocks(daemon, make_engine):
    shared = prompt(5, CHUNK + 2 * BLOCK + 3)
    make_engine(daemon).generate("one", shared + prompt(6, 10), count=1)
    other = make_engine(daemon)
    assert other.generate("other", shared + prompt(7, 100)).external == CHUNK + 2 * BLOCK
    assert make_engine(daemon).generate("third", shared + prompt(8, 4)).external == CHUNK + 2 * BLOCK


@pytest.mark.parametrize("blocks", [1, 3, 4, 5])
def test_blocks_that_the_engine_has_itself_are_left_out_of_a_load(daemon, make_engine, blocks):
    tokens = prompt(9, CHUNK + 3 * BLOCK + 5)
    make_engine(daemon).generate("cold", tokens, count=1)
    warm = make_engine(daemon)
    held = warm.add("held", [*tokens[: blocks * BLOCK], 5], count=40)
    warm.run(until=lambda: len(held.tokens) > 2)
    answer = warm.add("warm", tokens)
    warm.run()
    assert held.right
    assert answer.right
    assert (answer.local, answer.external) == (blocks * BLOCK, (7 - blocks) * BLOCK)
    loads = {load.group: load for load in warm.loads if load.request_id == "warm"}
    assert sum(len(ids_of(load)) for load in loads.values()) == 7 - blocks
    assert (0 in loads) == (blocks < PER_CHUNK)


def test_a_part_of_a_block_is_computed_and_not_loaded(daemon, make_engine):
    tokens = prompt(10, 2 * CHUNK + 2 * BLOCK)
    engine = make_engine(daemon)
    engine.generate("first", tokens, count=1)
    answer = engine.generate("second", tokens)
    assert (answer.local, answer.external) == (2 * CHUNK + BLOCK, 0)
    assert not engine.loads


def test_nothing_is_stored_twice(daemon, make_engine):
    tokens = prompt(11, CHUNK + 2 * BLOCK + 1)
    engine = make_engine(daemon)
    engine.generate("one", tokens, count=BLOCK)
    stored = [
        (store.group, store.keys[at : at + 32]) for store in engine.stores for at in range(0, len(store.keys), 32)
    ]
    assert len(stored) == len(set(stored)) == 1 + 2 + 1, "a chunk, two blocks of the prompt, one of the answer"


def test_an_idle_engine_stores_the_end_of_its_last_request(daemon, make_engine, how):
    engine = make_engine(daemon, **how)
    tokens = prompt(12, BLOCK - 1)
    engine.generate("one", tokens, count=10)
    assert [len(store.keys) // 32 for store in engine.stores] == [1]
    daemon.wait_for_accounting(tickets=0, pins=0)
    assert daemon.status()["l1"]["tail_blocks"] == 1


def test_an_aborted_request_leaves_what_it_had_computed(daemon, make_engine, how):
    tokens = prompt(13, 3 * CHUNK)
    engine = make_engine(daemon, **how, max_tokens_per_step=40)
    answer = engine.add("one", tokens)
    engine.run(until=lambda: len(engine.batch.rows) > 0)
    engine.step()
    engine.abort("one")
    engine.run()
    assert answer.finish_reason == "abort"
    warm = make_engine(daemon, **how)
    external = warm.generate("warm", tokens).external
    assert external in (2 * BLOCK, 5 * BLOCK - BLOCK, 5 * BLOCK), external


def test_a_request_that_is_aborted_while_it_loads_stores_nothing(make_daemon, make_engine, how):
    """Its blocks have not been filled."""
    daemon = make_daemon(tails="on", pauses=True)
    tokens = prompt(14, 2 * CHUNK + 2 * BLOCK + 1)
    make_engine(daemon).generate("cold", tokens, count=1)
    warm = make_engine(daemon, **how)
    with daemon.paused_copies():
        warm.begin_load("warm", tokens)
        warm.abort("warm")
        warm.step()
    warm.run()
    assert not warm.stores


@pytest.mark.parametrize("late", [False, True], ids=["", "the step before ends late"])
def test_a_preempted_request_that_is_aborted_before_its_blocks_are_filled_stores_none_of_them(
    daemon, make_engine, make_forgetful_engine, monkeypatch, late
):
    """What it had computed lay in other blocks. Its load fails, so the new ones count as neither found nor stored.

    Asynchronous: the step in which it was preempted may end when the load was planned, and is accepted then.
    """
    tokens, length = prompt(44, BLOCK + 4), 3 * BLOCK + 8
    engine = make_forgetful_engine(daemon, may_fail=True)
    engine.add("one", tokens, count=CHUNK)
    engine.run(until=lambda: len(tokens) + len(engine.answers["one"].tokens) >= length)
    assert [len(store.keys) // 32 for store in engine.stores] == [1], "of what it generated nothing is stored yet"
    make_engine(daemon).generate("other", tokens, count=length - len(tokens))
    engine.finish_steps()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    monkeypatch.setattr(LoadPlanner, "plan", lambda *_: 1 / 0)
    engine.run(until=lambda: bool(engine.loads))
    assert engine.status_of("one") == "WAITING_FOR_REMOTE_KVS"
    if late:
        engine.connector.scheduler._requests["one"].accepted_tokens = length
    engine.abort("one")
    engine.run()
    assert engine.errors() == {"planning of a load: ZeroDivisionError": 1}
    assert len(engine.stores) == 1


@pytest.mark.parametrize("drafts", [1, 3])
def test_rejected_drafts_are_in_no_block(daemon, make_engine, how, drafts):
    tokens = prompt(15, CHUNK + 3)
    cold = make_engine(daemon, **how, drafts=drafts)
    for count in (BLOCK, 2 * BLOCK + 5, CHUNK + 9):
        cold.generate(f"cold {count}", tokens, count=count)
    longer = tokens + continuation(tokens, CHUNK + 9)
    warm = make_engine(daemon, **how, drafts=drafts)
    assert warm.generate("warm", longer + prompt(16, 30)).external == whole(len(longer) - 1)


def test_the_last_token_is_in_no_block_though_drafts_were_computed_there(daemon, make_engine, how):
    """It ends a block, and the last step planned drafts behind it: the block has a draft's KV, or none, in its place."""
    tokens, count = prompt(42, CHUNK + 3), 2 * BLOCK - 3
    make_engine(daemon, **how, drafts=3).generate("cold", tokens, count=count)
    longer = tokens + continuation(tokens, count) + prompt(43, 5)
    assert make_engine(daemon, **how, drafts=3).generate("warm", longer).external == CHUNK + BLOCK


def test_preempted_requests_are_right_and_their_ends_are_found(daemon, make_engine, how):
    """But for those whose blocks the engine needed before a daemon of a busy machine began to store them."""
    engine, warm = make_engine(daemon, **how, num_blocks=36), make_engine(daemon, **how)
    stores: dict[int, StoreSpec] = {}
    aborted: list[int] = []

    def note(plan: StepPlan) -> None:
        stores.update({store.copy_id: store for store in plan.stores})
        aborted.extend(plan.abort_stores)

    engine.after_step = note
    for seed in range(20, 120, 10):
        prompts = {f"r{seed + i}": prompt(seed + i, 2 * CHUNK + 9 + i) for i in range(4)}
        answers = [engine.add(name, tokens, count=100) for name, tokens in prompts.items()]
        engine.run(60)
        assert engine.preemptions
        assert all(answer.right for answer in answers)
        begun = {stores[number].request_id for number in aborted if stores[number].first_chunk == 0}
        for name, tokens in prompts.items():
            longer = tokens + continuation(tokens, 100) + prompt(1000 + seed, 20)
            found = warm.generate(f"warm {name}", longer).external
            assert found >= whole(len(tokens)) - CHUNK or name in begun
        if begun.isdisjoint(prompts):
            return
    pytest.fail("a store of a prompt's beginning was aborted in all ten rounds")


def test_two_ranks_store_and_load_their_own_blocks(daemon, make_engine):
    tokens = prompt(17, CHUNK + 2 * BLOCK + 3)
    make_engine(daemon, world_size=2).generate("cold", tokens, count=1)
    warm = make_engine(daemon, world_size=2)
    assert warm.generate("warm", tokens).external == CHUNK + 2 * BLOCK
    assert warm.received == ["warm"]


def test_ranks_with_the_same_kv_take_turns_by_blocks(daemon, make_engine):
    def replicate(config: Any, caches: Any) -> None:
        caches.kv_tp_replicas = 2

    tokens = prompt(18, CHUNK + 3 * BLOCK + 3)
    options = {"world_size": 2, "adjust": replicate}
    cold = make_engine(daemon, **options)
    assert any(group.replicated for group in object_groups(cold.config, cold.caches))
    cold.generate("cold", tokens, count=1)
    warm = make_engine(daemon, **options)
    assert warm.generate("warm", tokens).external == CHUNK + 3 * BLOCK


def test_model_with_windows_stores_chunks_and_no_tail_blocks(daemon, make_engine):
    tokens = prompt(19, 3 * CHUNK + 2 * BLOCK + 1)
    make_engine(daemon, window=24).generate("cold", tokens, count=1)
    warm = make_engine(daemon, window=24)
    assert warm.generate("warm", tokens).external == 3 * CHUNK
    assert daemon.status()["l1"]["tail_blocks"] == 0


@pytest.mark.parametrize("newer", ["on", "off"])
def test_an_engine_follows_the_daemon_to_one_with_or_without_tails(make_daemon, make_engine, newer, caplog):
    """A daemon without tails is what an older one looks like."""
    caplog.set_level(logging.INFO, "vllm.kvserver")
    older = {"on": "off", "off": "on"}[newer]
    daemon = make_daemon(tails=older)
    engine = make_engine(daemon)
    tokens = prompt(21, CHUNK + 2 * BLOCK + 3)
    engine.generate("before", tokens, count=1)
    daemon.terminate()
    daemon.flags["tails"] = newer
    daemon.start()
    for half in ("worker 0", "scheduler"):
        wait_until(lambda half=half: connected(caplog, daemon, half), 20)
    other = prompt(22, CHUNK + 2 * BLOCK + 3)
    engine.generate("after", other, count=1)
    assert make_engine(daemon).generate("warm", other).external == CHUNK + (2 * BLOCK if newer == "on" else 0)


def test_a_failed_load_of_blocks_is_computed(make_daemon, make_engine):
    """The daemon is cleared between the lookup and the load."""
    daemon = make_daemon(tails="on")
    tokens = prompt(23, CHUNK + 2 * BLOCK + 3)
    make_engine(daemon).generate("cold", tokens, count=1)
    warm = make_engine(daemon)

    def clear(plan: Any) -> None:
        if plan.loads:
            assert daemon.http("/cache/clear", method="POST")[0] == 200

    warm.before_step = clear
    warm.generate("warm", tokens)
    assert warm.worker.worker.counters["load_failures"] == 1


def test_random_prompts_find_the_longest_prefix_by_blocks_that_any_request_ended_with(
    daemon, make_forgetful_engine, how
):
    """Against a plain model: chunks of every request, then blocks behind the first missing chunk."""
    dice = random.Random(7)
    engine = make_forgetful_engine(daemon)
    family = prompt(40, 4 * CHUNK)
    done: list[tuple[list[int], int]] = []  # tokens, how many of them have KV
    for number in range(25):
        cut = dice.randrange(5, len(family))
        tokens = [*family[:cut], *prompt(50 + number, dice.randrange(1, 40))]
        count = dice.randrange(1, 30)
        engine.pool.reset_prefix_cache()
        answer = engine.generate(f"r{number}", tokens, count=count)
        chunks = expected_chunks(done, tokens)
        blocks = expected_blocks(done, tokens, chunks)
        assert answer.external == min(blocks * BLOCK, len(tokens) - 1), (number, chunks, blocks)
        done.append((tokens + continuation(tokens, count), len(tokens)))


def expected_chunks(done: list[tuple[list[int], int]], tokens: list[int]) -> int:
    found = 0
    while (end := (found + 1) * CHUNK) <= len(tokens) and any(
        len(all_tokens) - 1 >= end and all_tokens[:end] == tokens[:end] for all_tokens, _ in done
    ):
        found += 1
    return found


def expected_blocks(done: list[tuple[list[int], int]], tokens: list[int], chunks: int) -> int:
    """Blocks are stored of the chunk in which a prompt ended and in which its request ended."""
    found = chunks * PER_CHUNK
    while (end := (found + 1) * BLOCK) <= min(len(tokens), (chunks + 1) * CHUNK):
        if not any(
            all_tokens[:end] == tokens[:end] and end <= last and last // CHUNK == (end - 1) // CHUNK
            for all_tokens, length in done
            for last in (length, len(all_tokens) - 1)
        ):
            break
        found += 1
    return found
