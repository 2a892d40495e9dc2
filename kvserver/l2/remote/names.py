"""Names in a shared store: `prefix/format/namespace_hex/generation_hex/group/key_hex`.

Owns: the form. All parts but the prefix are hexadecimal or numbers, so that no name leads out of the prefix.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvserver.l2.base import ObjectName

_SCOPE_BYTES = 32  # a namespace, then its epoch, then its LoRA


class Names:
    def __init__(self, prefix: str, record_format: int) -> None:
        self._root = f"{prefix}/{record_format}"

    def of(self, name: ObjectName, generation: int) -> str:
        return f"{self._root}/{name.namespace.hex()}/{generation:016x}/{name.group}/{name.key.hex()}"

    def of_ping(self) -> str:
        """Name of the few bytes that a ping writes, to find out whether the store takes writes."""
        return f"{self._root}/generations/ping"

    def of_id(self, scope: bytes) -> str:
        """Name of a scope's id, from which the generations of its namespaces follow."""
        return f"{self._root}/generations/{scope.hex() or 'all'}"


def scope_of(prefix: bytes) -> bytes:
    """The scope that a clear of `prefix` renews: all namespaces that begin with it, and more if it ends inside a part."""
    return prefix[: len(prefix) // _SCOPE_BYTES * _SCOPE_BYTES]


def scopes_of(namespace: bytes) -> Sequence[bytes]:
    """The scopes that a namespace is in, the widest first: everything, the model's, the epoch's, the LoRA's."""
    return [namespace[:end] for end in range(0, len(namespace) + 1, _SCOPE_BYTES)]
