"""The server's block hashes are those that this vLLM computes itself."""

from __future__ import annotations

import random

import pytest
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils

from kvserver.routing.block_hashes import hash_blocks


@pytest.mark.parametrize("block_tokens", [1, 2, 3, 4, 16, 128])
@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
def test_a_chain_of_blocks_has_the_hashes_of_vllm(algorithm, block_tokens):
    hash_function, generator = get_hash_fn_by_name(algorithm), random.Random(block_tokens)
    kv_cache_utils.init_none_hash(hash_function)
    start = kv_cache_utils.NONE_HASH
    for lora, salt in ((None, ""), (("name", "/path"), ""), (None, "salt"), (("ä" * 200, "/" * 300), "s" * 300)):
        tokens = [
            generator.choice([generator.randrange(1 << 18), 2**31, 2**40])
            for _ in range(block_tokens * 20 + block_tokens // 2)
        ]
        lora_keys = (("lora", *lora),) if lora else ()
        parent, expected = None, []
        for first in range(0, block_tokens * 20, block_tokens):
            extra = lora_keys + ((("cache_salt", salt),) if salt and first == 0 else ())
            block = tokens[first : first + block_tokens]
            parent = kv_cache_utils.hash_block_tokens(hash_function, parent, block, extra or None)
            expected.append(parent)
        assert list(hash_blocks(algorithm, start, block_tokens, tokens, lora, salt)) == expected
