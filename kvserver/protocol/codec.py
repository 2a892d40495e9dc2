"""The bytes of messages: msgpack, maps and arrays (`messages`), and the name of the field that cannot be decoded.

Owns: the encoder and the decoders. Refuses to know: frames, and what a message means.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar, get_args

import msgspec

from kvserver.protocol.errors import ErrorCode, KVServerError
from kvserver.protocol.fields import ArrayMessage, Message
from kvserver.protocol.messages import PROTOCOL_VERSION, ArrayRequest, Attach, AttachReply, MapRequest, Reply, Request

T = TypeVar("T")
_A_REQUEST = f"a request of protocol {PROTOCOL_VERSION}"
_encoder = msgspec.msgpack.Encoder()
_array_decoder: msgspec.msgpack.Decoder[ArrayRequest] = msgspec.msgpack.Decoder(ArrayRequest)
_map_decoder: msgspec.msgpack.Decoder[MapRequest] = msgspec.msgpack.Decoder(MapRequest)
_reply_decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
_attach_decoder = msgspec.msgpack.Decoder(Attach)
_attach_reply_decoder: msgspec.msgpack.Decoder[AttachReply] = msgspec.msgpack.Decoder(AttachReply)


def encode(message: Message | ArrayMessage) -> bytes:
    return _encoder.encode(message)


def decode_request(raw: bytes) -> Request:
    """KVServerError(BAD_MESSAGE) names the wrong field."""
    if raw[:1] in _ARRAY_BYTES:
        return _decode(_array_decoder, raw, f"{_A_REQUEST} that is an array ({_ARRAY_NAMES})", _name_fields)
    return _decode(_map_decoder, raw, f"{_A_REQUEST} that is a map")


def decode_reply(raw: bytes) -> Reply:
    return _reply_decoder.decode(raw)


def decode_attach(raw: bytes) -> Attach:
    """KVServerError(BAD_MESSAGE), as decode_request()."""
    return _decode(_attach_decoder, raw, f"an Attach of protocol {PROTOCOL_VERSION}")


def decode_attach_reply(raw: bytes) -> AttachReply:
    return _attach_reply_decoder.decode(raw)


def _decode(
    decoder: msgspec.msgpack.Decoder[T],
    raw: bytes,
    what: str,
    explain: Callable[[str, bytes], str] = lambda text, raw: text,
) -> T:
    try:
        return decoder.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        text = explain(str(error), raw)
        if len(text) > 400:  # it may quote the message, and a reply must not repeat a peer's megabytes
            text = f"{text[:200]} [...] {text[-100:]}"
        raise KVServerError(ErrorCode.BAD_MESSAGE, f"not {what}: {text}") from None


# ---- fields of arrays, by name ------------------------------------------------------------------


class _Tag(msgspec.Struct, array_like=True):
    """The first item of any array; the decoder skips the rest."""

    type: str


_tag_decoder = msgspec.msgpack.Decoder(_Tag)
_ARRAY_FIELDS = {t.__name__: ("type", *t.__struct_fields__) for t in get_args(ArrayRequest)}
_ARRAY_NAMES = ", ".join(_ARRAY_FIELDS)
_ARRAY_BYTES = {bytes([first]) for first in (*range(0x90, 0xA0), 0xDC, 0xDD)}  # that msgpack begins an array with


def _name_fields(text: str, raw: bytes) -> str:
    """The decoder's error text with field names for positions: `$[4]` of a Store is `$.keys`."""
    try:
        names = _ARRAY_FIELDS.get(_tag_decoder.decode(raw).type, ("type",))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        names = ("type",)
    if short := re.fullmatch(r"Expected `array` of at least length \d+, got (\d+)", text):
        missing = int(short[1])
        return f"Array is missing required field `{names[missing]}`" if missing < len(names) else text
    return re.sub(
        r"`\$\[(\d{1,3})\]`$", lambda at: f"`$.{names[int(at[1])]}`" if int(at[1]) < len(names) else at[0], text
    )
