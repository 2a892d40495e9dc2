"""Computes an engine's block hashes from token ids. vLLM's cover the hash before, the block's tokens and its extra keys:

    hash = SHA-256(dumps((hash before, (token, ...), extra keys or None)))

with pickle's protocol 5 ("sha256") or canonical CBOR ("sha256_cbor"). Only these two: xxhash starts from a secret. Nothing
is unpickled. A block of 16 tokens costs 3 to 6 us (bench/match.py); other threads get a turn every 128 blocks.

SGLang's cover the hash before and the tokens alone. The first one follows a seed where the request has a salt. With EAGLE each token
is followed by the next one.

    hash = SHA-256(hash before, tokens as u32 little-endian)

Owns: the chain. Refuses to know: engines, and the use of the hashes.
"""

from __future__ import annotations

import hashlib
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, pairwise
from pickle import dumps

ALGORITHMS = ("sha256", "sha256_cbor")  # of vLLM's
_SHORT_BYTES = 8
_BLOCKS_BETWEEN_TURNS = 128


def hash_blocks(
    algorithm: str, start: bytes, block_tokens: int, tokens: Sequence[int], lora: tuple[str, str] | None, salt: str
) -> Iterator[bytes]:
    """The hash of each whole block of a prompt. `start`: the hash before the first block; `lora`: name and path.

    As vLLM 0.32 does; earlier versions hash LoRAs and salts in other shapes. ValueError if `algorithm` is not in ALGORITHMS.
    REQUIRES: tokens from 0 on.
    """
    encode = _encoder(algorithm)
    every = (("lora", *lora),) if lora is not None else ()
    extra = (*every, ("cache_salt", salt)) if salt else every
    parent = start
    for number in range(len(tokens) // block_tokens):
        block = tuple(tokens[number * block_tokens : (number + 1) * block_tokens])
        parent = hashlib.sha256(encode((parent, block, extra or None))).digest()
        yield parent
        extra = every
        if number % _BLOCKS_BETWEEN_TURNS == _BLOCKS_BETWEEN_TURNS - 1:
            time.sleep(0)


def hash_pages(block_tokens: int, tokens: Sequence[int], salt: str, pairs: bool = False) -> Iterator[bytes]:
    """The key of each whole page of a prompt of SGLang's: its hash with the first 8 bytes moved to the end.

    As SGLang 0.5.23 does, for requests without `extra_key`. `pairs`: with the token behind each token. OverflowError if a token id exceeds 32 bits.
    """
    parent = b""
    if salt:
        raw = salt.encode()
        parent = hashlib.sha256(b"sglang-cache-namespace-v1\x00\x01" + len(raw).to_bytes(8, "little") + raw).digest()
    for number in range((len(tokens) - pairs) // block_tokens):
        of_page = tokens[number * block_tokens : (number + 1) * block_tokens + pairs]
        page = array("I", chain.from_iterable(pairwise(of_page)) if pairs else of_page)
        parent = hashlib.sha256(parent + page.tobytes()).digest()
        yield parent[_SHORT_BYTES:] + parent[:_SHORT_BYTES]
        if number % _BLOCKS_BETWEEN_TURNS == _BLOCKS_BETWEEN_TURNS - 1:
            time.sleep(0)


def _encoder(algorithm: str) -> Callable[[object], bytes]:
    if algorithm == "sha256":
        return partial(dumps, protocol=5)
    if algorithm == "sha256_cbor":
        import cbor2

        return partial(cbor2.dumps, canonical=True)
    raise ValueError(
        f"block hashes by {algorithm or 'an unknown algorithm'} cannot be computed here; {' and '.join(ALGORITHMS)} can"
    )
