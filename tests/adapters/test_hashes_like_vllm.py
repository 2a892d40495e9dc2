"""The server's block hashes are those that this vLLM computes itself."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.properties import examples
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils

from kvserver.routing.block_hashes import hash_blocks

TOKENS = st.lists(st.integers(0, 1 << 18) | st.sampled_from([2**31, 2**40]), max_size=80)
TEXT = st.text(min_size=1) | st.integers(1, 300).map(lambda length: "ä" * length)
LORA = st.none() | st.tuples(TEXT, TEXT)


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
@given(
    block_tokens=st.sampled_from([1, 2, 3, 4, 16, 128]),
    tokens=TOKENS,
    repeats=st.integers(1, 4),
    lora=LORA,
    salt=st.just("") | TEXT,
)
@examples(40)
def test_a_chain_of_blocks_has_the_hashes_of_vllm(algorithm, block_tokens, tokens, repeats, lora, salt):
    hash_function, tokens = get_hash_fn_by_name(algorithm), tokens * repeats
    kv_cache_utils.init_none_hash(hash_function)
    start = parent = kv_cache_utils.NONE_HASH
    lora_keys = (("lora", *lora),) if lora else ()
    expected = []
    for first in range(0, len(tokens) - block_tokens + 1, block_tokens):
        extra = lora_keys + ((("cache_salt", salt),) if salt and first == 0 else ())
        parent = kv_cache_utils.hash_block_tokens(
            hash_function, parent, tokens[first : first + block_tokens], extra or None
        )
        expected.append(parent)
    assert list(hash_blocks(algorithm, start, block_tokens, tokens, lora, salt)) == expected
