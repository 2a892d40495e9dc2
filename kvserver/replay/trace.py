"""Request traces as Mooncake publishes them: a JSON object a line, one for each request.

Fields of a line; others are ignored:
- `timestamp` in milliseconds, `input_length` and `output_length` in tokens.
- `hash_ids`: an id for each block of the prompt. Equal ids are equal prefixes up to there.
- `chunk_tokens` (kvserver's recordings): the tokens of a block.
- `lost` (kvserver's recordings): the number of requests that are missing before the line.
- `session_id`: the session of the request; "", absent or no text: the request has none.
- `ends_session`: the session is deleted after the request.

Owns: what a good line is, and the keys that ids become. Refuses to know: caches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from kvserver.protocol import KEY_BYTES, ConfigError

_text = msgspec.json.Decoder(str)
_Count = Annotated[int, Meta(ge=0)]


class TraceError(ConfigError):
    """Trace that cannot be replayed; the text has the number of the line."""


class _Line(msgspec.Struct):
    timestamp: Annotated[float, Meta(ge=0)]
    input_length: _Count
    output_length: _Count
    hash_ids: list[_Count]
    lost: _Count = 0
    chunk_tokens: _Count = 0
    session_id: msgspec.Raw = msgspec.Raw(b'""')
    ends_session: bool = False


class TracePrompt(NamedTuple):
    """A prompt. `seconds`: from the trace's first request on. `keys`: KEY_BYTES for each of its blocks."""

    seconds: float
    keys: bytes
    tokens: int = 0
    session_id: str = ""
    ends_session: bool = False

    @property
    def blocks(self) -> int:
        return len(self.keys) // KEY_BYTES


class Trace(NamedTuple):
    requests: list[TracePrompt]
    blocks: int  # of all prompts
    distinct_blocks: int
    most_blocks: int  # of one prompt
    lost: int  # requests that the recording lost
    block_tokens: int = 0  # as the lines state it, or the most that a prompt has for each of its blocks


def read_trace(lines: Iterable[bytes], name: str, progress: Callable[[int], None] = lambda requests: None) -> Trace:
    """The trace in `lines`; empty lines are left out. TraceError names `name` and the first bad line.

    A request with an earlier timestamp than the one before it has that one's: time does not go back.
    """
    decoder = msgspec.json.Decoder(_Line)
    requests: list[TracePrompt] = []
    distinct: set[int] = set()
    blocks, most, lost, block_tokens, first, now = 0, 0, 0, 0, 0.0, 0.0
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            line = decoder.decode(text)
            session = _text.decode(line.session_id) if bytes(line.session_id).startswith(b'"') else ""
            keys = b"".join([id.to_bytes(KEY_BYTES, "little") for id in line.hash_ids])
        except (msgspec.DecodeError, OverflowError, UnicodeDecodeError) as error:
            raise TraceError(f"{name}, line {number}: {error}") from None
        if not requests:
            first = line.timestamp
        now = max(now, line.timestamp - first)
        requests.append(TracePrompt(now / 1000, keys, line.input_length, session, line.ends_session))
        if line.hash_ids:
            block_tokens = max(block_tokens, line.chunk_tokens or -(-line.input_length // len(line.hash_ids)))
        distinct.update(line.hash_ids)
        blocks += len(line.hash_ids)
        most = max(most, len(line.hash_ids))
        lost += line.lost
        progress(len(requests))
    if not requests:
        raise TraceError(f"{name}: no request is in it")
    return Trace(requests, blocks, len(distinct), most, lost, block_tokens)
