"""Before vLLM 0.32 nothing states how finely it hashes; with several groups and a prefix match unit keys covered 64 of 256 tokens."""

from __future__ import annotations

import copy
import dataclasses
from types import SimpleNamespace

import pytest
from made_up_model import BLOCK, prompt
from modelless import configure
from support.daemon import wait_until
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, resolve_kv_cache_block_sizes
from vllm.v1.request import Request

from kvserver.adapters.vllm import KVServerConnector
from kvserver.protocol import KEY_BYTES, DescribeScheduler, Lookup

UNIT = 16  # tokens a hash
GROUP_BLOCK = 4 * UNIT  # of each group
CHUNK = 4 * GROUP_BLOCK
TOKENS = prompt(1, 3 * CHUNK + 10)


def two_coarse_groups(config, caches):
    """As vLLM 0.31 hands over such an engine."""
    spec = dataclasses.replace(caches.kv_cache_groups[0].kv_cache_spec, block_size=GROUP_BLOCK)
    caches.kv_cache_groups[0].kv_cache_spec = spec
    caches.kv_cache_groups.append(copy.copy(caches.kv_cache_groups[0]))
    config.cache_config.block_size = GROUP_BLOCK
    config.cache_config.prefix_match_unit = UNIT
    caches.hash_block_size = None


@pytest.fixture
def make_scheduler(model_folder):
    """The scheduler half alone, which needs no worker to ask."""
    made = []

    def make(endpoint: str):
        config, caches = configure(model_folder, endpoint, adjust=two_coarse_groups)
        assert resolve_kv_cache_block_sizes(caches, config) == (GROUP_BLOCK, UNIT), "as the engine hashes"
        made.append(KVServerConnector(config, KVConnectorRole.SCHEDULER, caches))
        made[-1].bind_gpu_block_pool(BlockPool(num_gpu_blocks=9, enable_caching=True, hash_block_size=UNIT))
        return made[-1]

    yield make
    for connector in made:
        connector.shutdown()
        assert connector.errors == {}


def request(name: str, tokens: list[int]) -> Request:
    hash_function = get_hash_fn_by_name("sha256")
    init_none_hash(hash_function)
    hasher = get_request_block_hasher(UNIT, hash_function)
    return Request(name, tokens, SamplingParams(max_tokens=1), None, block_hasher=hasher)


def test_a_key_covers_its_whole_chunk(make_daemon, make_tap, make_scheduler):
    tap = make_tap(make_daemon(chunk_tokens=CHUNK))
    connector = make_scheduler(tap.endpoint)
    other_end = [*TOKENS[: CHUNK - 1], TOKENS[CHUNK - 1] ^ 1, *TOKENS[CHUNK:]]
    for name, tokens in (("one", TOKENS), ("other", other_end)):
        connector.on_new_request(request(name, tokens))
    wait_until(lambda: len(tap.of(Lookup)) == 2)
    one, other = (lookup.keys for lookup in tap.of(Lookup))
    assert len(one) == 3 * KEY_BYTES
    assert one == b"".join(bytes(h) for h in request("again", TOKENS).block_hashes[CHUNK // UNIT - 1 :: CHUNK // UNIT])
    assert one[:KEY_BYTES] != other[:KEY_BYTES], "prompts that differ in the last token of their first chunk"


def test_description_for_routers_states_the_hash_block_of_the_engine(make_daemon, make_tap, make_scheduler):
    tap = make_tap(make_daemon(chunk_tokens=CHUNK))
    connector = make_scheduler(tap.endpoint)
    nothing = SimpleNamespace(
        num_scheduled_tokens={},
        total_num_scheduled_tokens=0,
        scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[], resumed_req_ids=set(), num_computed_tokens=[], new_block_ids=[]
        ),
    )
    connector.build_connector_meta(nothing)
    wait_until(lambda: tap.of(DescribeScheduler))
    assert tap.of(DescribeScheduler)[0].hash_block_tokens == UNIT


def test_one_group_hashes_as_it_has_blocks(make_daemon, make_engine):
    def as_before(config, caches):
        caches.hash_block_size = None
        config.cache_config.block_size = 4 * BLOCK  # what a worker's process has may be of the start

    daemon = make_daemon(chunk_tokens=64)
    make_engine(daemon, adjust=as_before).generate("cold", TOKENS)
    assert make_engine(daemon).generate("warm", TOKENS).external == len(TOKENS) // 64 * 64
