"""vLLM 0.29 hands over tables as a dict, of requests with new blocks only; get_block_ids() is 0.30's, so each step raised and nothing was stored."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from made_up_model import BLOCK, prompt
from modelless import Engine
from support.daemon import wait_until

from kvserver.adapters.common.specs import ids_of
from kvserver.protocol import ReportBlockAllocations

CHUNK = 64
TOKENS = prompt(1, 3 * CHUNK - 4)


@dataclass
class BlockState:
    """KVConnectorBlockState of vLLM 0.29."""

    block_ids: dict[str, tuple[list[int], ...]]
    boundary_state_offloads: dict[str, list[tuple[int, int, int]]]


def hand_over_as_0_29(engine: Engine) -> None:
    build = engine.connector.build_connector_meta

    def build_connector_meta(output):
        tables = output.kv_connector_block_state
        cached = output.scheduled_cached_reqs
        names = [new.req_id for new in output.scheduled_new_reqs]
        names += [name for name, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True) if blocks]
        output.kv_connector_block_state = BlockState({name: tables.get_block_ids(name) for name in names}, {})
        return build(output)

    engine.connector.build_connector_meta = build_connector_meta


@pytest.mark.parametrize("asynchronous", [True, False], ids=["async", "sync"])
def test_engine_of_vllm_0_29_stores_loads_and_reports(make_daemon, make_tap, make_engine, asynchronous):
    """The prompt's third chunk is completed in a step that gives the request no block."""
    tap = make_tap(make_daemon(chunk_tokens=CHUNK))
    first = make_engine(tap.endpoint, asynchronous=asynchronous)
    hand_over_as_0_29(first)
    answer = first.generate("cold", TOKENS, count=3 * CHUNK)
    wait_until(lambda: tap.of(ReportBlockAllocations))
    second = make_engine(tap.endpoint, asynchronous=asynchronous)
    hand_over_as_0_29(second)
    assert second.generate("warm", TOKENS + answer.tokens).external == 5 * CHUNK


def test_preempted_requests_are_stored_from_their_new_blocks(make_daemon, make_engine):
    daemon = make_daemon(chunk_tokens=CHUNK)
    engine = make_engine(daemon, num_blocks=40)
    hand_over_as_0_29(engine)
    resumed: set[str] = set()  # requests that stored what they computed after they were preempted

    def check(plan):
        for store in plan.stores:
            (table,) = engine.scheduler.kv_cache_manager.get_block_ids(store.request_id)
            ids, first = ids_of(store), store.first_chunk * CHUNK // BLOCK
            assert ids == table[first : first + len(ids)], f"{store.request_id} is stored from blocks that it lost"
            if engine.scheduler.requests[store.request_id].num_preemptions:
                resumed.add(store.request_id)

    engine.before_step = check
    answers = [engine.add(f"r{i}", prompt(i, 2 * CHUNK), count=2 * CHUNK) for i in range(4)]
    engine.run()
    assert engine.preemptions > 0
    assert resumed
    assert all(answer.right for answer in answers)
    other = make_engine(daemon)
    for i, answer in enumerate(answers):
        other.generate(f"w{i}", prompt(i, 2 * CHUNK) + answer.tokens)
    assert sum(other.answers[f"w{i}"].external for i in range(4)) > 4 * CHUNK
