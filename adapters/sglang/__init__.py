"""kvserver's adapter for SGLang: `KVServerLinker`, an external linker of its unified radix cache.

`contract` compares SGLang's interface with the one that `linker` was written for, and `without_cache` is the linker of an
engine that cannot be served. `cache` carries out what the linker is asked: `hits` are the answers to lookups, `loads` is the wait
for a copy, `kept_slots` the slots that a late copy may still write. `registration` is what a rank registers, with `pools` for its
tensors, `identity` for what engines must agree on and `support` for what is refused. `keys` is the form of its keys, and `events`
the address of its own KV events.
"""

from kvserver.adapters.sglang.linker import KVServerLinker as KVServerLinker
