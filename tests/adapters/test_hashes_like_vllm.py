"""The server's block hashes are those that this vLLM computes itself."""

from __future__ import annotations

import random

import pytest
from vllm.utils.hashing import get_hash_fn_by_name, sha256_cbor
from vllm.v1.core import kv_cache_utils

from kvserver.routing.block_hashes import cbor, hash_blocks


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


def test_the_bytes_of_cbor_are_those_of_its_library():
    cbor2 = pytest.importorskip("cbor2")
    generator = random.Random(1)
    for _ in range(2000):
        parent = generator.randbytes(generator.choice([0, 16, 32]))
        tokens = tuple(generator.randrange(1 << generator.randrange(1, 64)) for _ in range(generator.randrange(300)))
        extra = tuple(
            ("lora", "n" * generator.randrange(300), "é" * generator.randrange(3))
            for _ in range(generator.randrange(3))
        )
        assert cbor(parent, tokens, extra) == cbor2.dumps((parent, tokens, extra or None), canonical=True)
    assert sha256_cbor((b"p", (1,), None))
