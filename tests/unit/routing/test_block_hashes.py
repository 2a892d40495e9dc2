"""Block hashes: of what pickle writes, and of CBOR as RFC 8949 defines it.

tests/adapters/test_hashes_like_vllm.py compares with vLLM's own functions.
"""

from __future__ import annotations

import hashlib
import pickle

import pytest

from kvserver.routing.block_hashes import hash_blocks, hash_pages


def test_cbor_is_canonical():
    tokens = [0, 23, 24, 255, 256, 65535, 65536, 2**32 - 1, 2**32]
    (found,) = hash_blocks("sha256_cbor", b"\1" * 32, len(tokens), tokens, ("n", "ä" * 12), "")
    written = bytes.fromhex(
        "83 5820" + "01" * 32 + "89 00 17 1818 18ff 190100 19ffff 1a00010000 1affffffff 1b0000000100000000"
        "81 83 646c6f7261 616e 7818" + "c3a4" * 12
    )
    assert found == hashlib.sha256(written).digest()


def test_each_hash_covers_the_one_before_and_half_blocks_have_none():
    hashes = list(hash_blocks("sha256", b"start", 2, [1, 2, 3, 4, 5], None, ""))
    one = hashlib.sha256(pickle.dumps((b"start", (1, 2), None), 5)).digest()
    two = hashlib.sha256(pickle.dumps((one, (3, 4), None), 5)).digest()
    assert hashes == [one, two]


def test_a_lora_is_in_every_block_and_a_salt_in_the_first():
    lora, salt = ("lora", "name", "/path"), ("cache_salt", "secret")
    one, two = hash_blocks("sha256", b"start", 1, [7, 8], ("name", "/path"), "secret")
    assert one == hashlib.sha256(pickle.dumps((b"start", (7,), (lora, salt)), 5)).digest()
    assert two == hashlib.sha256(pickle.dumps((one, (8,), (lora,)), 5)).digest()


@pytest.mark.parametrize("algorithm", ["xxhash", "xxhash_cbor", ""])
def test_what_starts_from_a_secret_is_refused_by_name(algorithm):
    with pytest.raises(
        ValueError, match=f"{algorithm or 'unknown'}.*cannot be computed here; sha256 and sha256_cbor can"
    ):
        list(hash_blocks(algorithm, b"start", 16, range(16), None, ""))


def test_pages_of_sglang_are_chained_over_their_tokens_and_end_in_the_short_form() -> None:
    tokens = list(range(100_000, 100_070))
    first = hashlib.sha256(b"".join(token.to_bytes(4, "little") for token in tokens[:32])).digest()
    second = hashlib.sha256(first + b"".join(token.to_bytes(4, "little") for token in tokens[32:64])).digest()
    assert list(hash_pages(32, tokens, "")) == [one[8:] + one[:8] for one in (first, second)]
    assert list(hash_pages(32, tokens, "salt")) != list(hash_pages(32, tokens, ""))
    with pytest.raises(OverflowError):
        list(hash_pages(1, [1 << 32], ""))


def test_pages_of_pairs_have_the_next_token_behind_each() -> None:
    words = b"".join(token.to_bytes(4, "little") for token in (1, 2, 2, 3))
    first = hashlib.sha256(words).digest()
    assert list(hash_pages(2, [1, 2, 3, 4], "", pairs=True)) == [first[8:] + first[:8]]
    assert list(hash_pages(2, [], "", pairs=True)) == []
