"""Differences between engines: the fields that keep an engine from using another one's chunks.

It remembers the fields behind the namespaces of registered engines, and of engines that disconnected, since chunks outlive them.
It keeps digests of all fields and the values that are safe to show, at most MOST_BYTES in all. The oldest is forgotten first.

Owns: that memory and the comparison. Refuses to know: chunks, requests. From one thread at a time.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TypeAlias, TypedDict

import msgspec

from kvserver.cache import fingerprint_parts, split_namespace
from kvserver.events import NamespaceFormed

MOST_BYTES = 4 << 20
MOST_FIELDS = 64  # that one comparison names
_MOST_INSTANCES = 4  # of a namespace, by name
_LONGEST_VALUE = 100
_DIGEST_BYTES = 6
_OVERHEAD_BYTES = 3072  # of a namespace, beside its fields: names of instances

_Fields: TypeAlias = dict[str, tuple[bytes, str]]  # digest and value by name
_encode = msgspec.msgpack.Encoder(order="deterministic").encode
_decoder: msgspec.msgpack.Decoder[_Fields] = msgspec.msgpack.Decoder(_Fields)


class Field(TypedDict):
    """Field in which two engines differ; `here` is of the engine that missed.

    A value that may not be shown is "#" and the start of its digest.
    """

    name: str
    here: str
    there: str


class Difference(TypedDict):
    """Difference between two engines. `known` is False if the engine that stored the chunk is no longer remembered."""

    known: bool
    fields: list[Field]
    more_fields: int
    instances: list[str]  # that registered with the other namespace


@dataclass(slots=True)
class _Made:
    fields: bytes
    instances: list[str] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        return len(self.fields) + _OVERHEAD_BYTES


class Differences:
    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self.bytes = 0
        self._most_bytes = most_bytes
        self._made: OrderedDict[bytes, _Made] = OrderedDict()  # by registration's part of the namespace
        self._last: tuple[bytes, bytes, Difference] | None = None

    def __len__(self) -> int:
        return len(self._made)

    def formed(self, event: NamespaceFormed) -> None:
        made = self._made.pop(event.namespace, None)
        if made is None:
            shown = {name: _shown(content, value) for name, content, value in fingerprint_parts(event.ranks)}
            made = _Made(_encode(shown))
            self.bytes += made.bytes
        if event.instance_id not in made.instances:
            made.instances = [event.instance_id, *made.instances][:_MOST_INSTANCES]
        self._made[event.namespace] = made
        self._last = None
        while self.bytes > self._most_bytes:
            _, oldest = self._made.popitem(last=False)
            self.bytes -= oldest.bytes

    def between(self, here: bytes, there: bytes) -> Difference:
        """Difference between the namespace of a lookup and one that has its chunk."""
        if self._last is None or self._last[:2] != (here, there):
            self._last = here, there, self._compare(here, there)
        return self._last[2]

    def _compare(self, here: bytes, there: bytes) -> Difference:
        (base, *variant), (other_base, *other_variant) = split_namespace(here), split_namespace(there)
        fields: list[Field] = []
        made, other = self._made.get(base), self._made.get(other_base)
        if made is not None and other is not None and base != other_base:
            ours, theirs = _decoder.decode(made.fields), _decoder.decode(other.fields)
            for name in sorted({*ours, *theirs}):
                if ours.get(name, (b"",))[0] != theirs.get(name, (b"",))[0]:
                    fields.append(Field(name=name, here=_text(ours, name), there=_text(theirs, name)))
        for name, a, b in zip(("weights epoch", "LoRA"), variant, other_variant, strict=True):
            if a != b:
                fields.append(Field(name=name, here=_short(a), there=_short(b)))
        return Difference(
            known=made is not None and other is not None,
            fields=fields[:MOST_FIELDS],
            more_fields=max(0, len(fields) - MOST_FIELDS),
            instances=list(other.instances) if other is not None else [],
        )


def _shown(content: object, value: str) -> tuple[bytes, str]:
    digest = hashlib.sha256(_encode(content)).digest()[:_DIGEST_BYTES]
    return digest, value if len(value) <= _LONGEST_VALUE else ""


def _text(fields: _Fields, name: str) -> str:
    if name not in fields:
        return "none"
    digest, value = fields[name]
    return value or _short(digest)


def _short(digest: bytes) -> str:
    return "#" + digest[:_DIGEST_BYTES].hex() if digest else "none"
