"""Chunks as the scheduler half counts and names them.

Owns: their size, as the daemon of this session sets it. Refuses to know: lookups and stores.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvserver.protocol import KEY_BYTES

if TYPE_CHECKING:
    from vllm.v1.request import Request


class Chunks:
    def __init__(self, block_tokens: int, hash_block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.hash_block_tokens = hash_block_tokens
        self.blocks = 1  # in each

    def resize(self, chunk_tokens: int) -> None:
        self.blocks = max(1, chunk_tokens // self.block_tokens)

    @property
    def tokens(self) -> int:
        return self.blocks * self.block_tokens

    def hashed(self, request: Request) -> int:
        """How many chunks of the request the engine has hashed."""
        return len(request.block_hashes) * self.hash_block_tokens // self.tokens

    def keys(self, request: Request, first: int, last: int) -> bytes:
        """Keys of chunks [first, last): the engine's hash of each chunk's last block."""
        step = self.tokens // self.hash_block_tokens
        hashes = request.block_hashes[(first + 1) * step - 1 : last * step : step]
        return b"".join(bytes(h).ljust(KEY_BYTES, b"\0") for h in hashes)

    def block_hashes(self, request: Request, first: int, last: int) -> list[bytes]:
        """Hashes of blocks [first, last): where hashes are finer, the hash of a block's last part."""
        step = self.block_tokens // self.hash_block_tokens
        hashes: list[bytes] = request.block_hashes[(first + 1) * step - 1 : last * step : step]
        return hashes
