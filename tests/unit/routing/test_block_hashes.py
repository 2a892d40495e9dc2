"""The bytes that block hashes are made of: as pickle itself writes them, and as RFC 8949 defines CBOR.

tests/adapters/test_hashes_like_vllm.py compares with vLLM's own functions.
"""

from __future__ import annotations

import hashlib
import pickle
import random

import pytest

from kvserver.routing.block_hashes import cbor, hash_blocks, pickled

IDS = [0, 1, 23, 24, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**63 - 1]
WORDS = ["", "a", "ä" * 127, "x" * 255, "x" * 256, "名前", "/models/lora"]


def plain(parent, tokens, extra):
    """What vLLM hands to pickle, with no object in it twice."""
    return (parent, tuple(tokens), tuple(tuple("".join(list(word)) for word in key) for key in extra) or None)


def random_extra(generator):
    lora = [("lora", f"{generator.choice(WORDS)}-name", f"{generator.choice(WORDS)}-path")]
    salt = [("cache_salt", f"{generator.choice(WORDS)}-salt")]
    return tuple(lora * generator.randrange(2) + salt * generator.randrange(2))


@pytest.mark.parametrize("block_tokens", [0, 1, 2, 3, 4, 16, 128])
def test_pickle_writes_the_same(block_tokens):
    generator = random.Random(block_tokens)
    for _ in range(1000):
        parent = generator.randbytes(generator.choice([0, 1, 16, 32, 255]))
        tokens = [generator.choice(IDS + [generator.randrange(1 << 17)] * 20) for _ in range(block_tokens)]
        extra = random_extra(generator)
        assert pickled(parent, tokens, extra) == pickle.dumps(plain(parent, tokens, extra), 5)


def test_pickle_begins_its_frames_at_the_same_places():
    generator = random.Random(1)
    around = [*range(13_090, 13_115), *range(26_190, 26_220), 21_800, 21_860, 100_000]
    for count in around:
        tokens = [generator.choice([70_000, 70_000, 70_000, 300, 3]) if count % 2 else 70_000 for _ in range(count)]
        extra = random_extra(generator)
        assert pickled(b"p" * 32, tokens, extra) == pickle.dumps(plain(b"p" * 32, tokens, extra), 5)
    for length in range(65_400, 65_540):  # the last frame is hardly begun, or not at all
        tokens = [3] * ((length - 40) // 2) + [300] * (length % 2)
        assert pickled(b"p" * 32, tokens, ()) == pickle.dumps(plain(b"p" * 32, tokens, ()), 5)


def test_cbor_is_written_in_its_shortest_form():
    written = cbor(b"\1" * 32, [0, 23, 24, 255, 256, 65535, 65536, 2**32 - 1, 2**32], (("lora", "n", "ä" * 12),))
    assert written == bytes.fromhex(
        "83 5820" + "01" * 32 + "89 00 17 1818 18ff 190100 19ffff 1a00010000 1affffffff 1b0000000100000000"
        "81 83 646c6f7261 616e 7818" + "c3a4" * 12
    )
    assert cbor(b"", range(24), ()) == bytes.fromhex("83 40 9818") + bytes(range(24)) + b"\xf6"


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
