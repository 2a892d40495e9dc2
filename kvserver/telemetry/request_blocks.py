"""Blocks that an engine's requests own, for engines that report them: numbers for requests, names for contents.

A content id of tokens is the 8-byte BLAKE2b of the previous id, in the same request and group, and the block's tokens. It is
computed from position 0 on, where the previous id is empty. Where the engine left positions out, it begins with a hash of the
position. Then equal tokens at equal positions count as equal contents, whatever precedes them.

Owns: the number of each request that has not ended, and the content ids of engines that send tokens instead. Refuses to know:
what becomes of the blocks (`_native.BlockLifetimes`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b

from kvserver._native import BlockLifetimes
from kvserver.protocol import CONTENT_BYTES, TOKEN_BYTES, Owned, Released, ReportedBlocks

MAX_REQUESTS = 1 << 16  # that have not ended, of one instance


@dataclass(slots=True)
class _ContentChain:
    """Content ids of positions [first, ...) of one request and group."""

    first: int = 0
    contents: bytearray = field(default_factory=bytearray)

    def extend(self, index: int, tokens: bytes, block_tokens: int) -> bytes:
        """The ids of the whole blocks in `tokens`, which begin at position `index`. Ids known from there on are replaced."""
        known = index - self.first
        if not 0 <= known * CONTENT_BYTES <= len(self.contents):
            self.first, known = index, 0
        del self.contents[known * CONTENT_BYTES :]
        size = block_tokens * TOKEN_BYTES
        before = bytes(self.contents[-CONTENT_BYTES:]) or self._root()
        for begin in range(0, len(tokens) - size + 1, size):
            before = _digest(before + tokens[begin : begin + size])
            self.contents += before
        return bytes(self.contents[known * CONTENT_BYTES :])

    def _root(self) -> bytes:
        return _digest(b"position %d" % self.first) if self.first else b""


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=CONTENT_BYTES).digest()


@dataclass(slots=True)
class _Request:
    number: int
    chains: dict[int, _ContentChain] = field(default_factory=dict)  # by group


class RequestBlocks:
    """Applies the blocks that requests own to the lifetimes of one pool."""

    def __init__(self, lifetimes: BlockLifetimes) -> None:
        self._lifetimes = lifetimes
        self._requests: dict[str, _Request] = {}
        self._numbered = 0

    def apply(self, payload: ReportedBlocks, block_ids: tuple[bytes, ...]) -> None:
        """`block_ids`: of each record, u32. With `full` the payload is the full state. ValueError: too many requests."""
        for record, blocks in zip(payload.records, block_ids, strict=True):
            if isinstance(record, Released):
                if (owner := self._requests.get(record.request_id)) is not None:
                    self._lifetimes.release_blocks(owner.number, blocks, payload.time_ns)
                continue
            request = self._request(record.request_id)
            contents = self._contents(request, record, payload.block_tokens)
            self._lifetimes.own_blocks(
                request.number, record.group, blocks, contents, payload.time_ns, not payload.full
            )

    def end(self, request_id: str, time_ns: int) -> None:
        if (request := self._requests.pop(request_id, None)) is not None:
            self._lifetimes.end_request(request.number, time_ns)

    def _request(self, request_id: str) -> _Request:
        request = self._requests.get(request_id)
        if request is None:
            if len(self._requests) >= MAX_REQUESTS:
                raise ValueError(f"more than {MAX_REQUESTS} requests own blocks and none of them ends")
            self._numbered += 1
            request = self._requests[request_id] = _Request(self._numbered)
        return request

    @staticmethod
    def _contents(request: _Request, record: Owned, block_tokens: int) -> bytes:
        if record.contents or not record.tokens:
            return record.contents
        chain = request.chains.setdefault(record.group, _ContentChain(record.first_index))
        return chain.extend(record.first_index, record.tokens, block_tokens)
