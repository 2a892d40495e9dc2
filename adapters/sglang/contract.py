"""SGLang's linker interface as this adapter was written for it.

The interface moves between releases. An engine whose interface is another one must start all the same, and run without cache.

Owns: the comparison. Refuses to know: what a linker does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from copy import copy
from typing import Any

from kvserver.adapters.common.log import log

METHODS: dict[str, tuple[str, ...]] = {  # abstract method -> its parameters
    "lookup": ("rid", "transfers"),
    "load": ("rid", "transfers"),
    "start_layer_wise_loading": (),
    "finish_layer_wise_loading": ("counter_index",),
    "cancel_queued_load": ("rid",),
    "offload": ("transfers", "session_id"),
    "num_completed_offloads": (),
    "pop_completed_offload": (),
    "reset": (),
    "close": (),
}
_RESULTS: dict[str, Any] = {
    "start_layer_wise_loading": -1,
    "finish_layer_wise_loading": True,
    "reset": None,
    "close": None,
}
_OF_TYPE = {"list": [], "dict": {}, "int": 0, "None": None}  # declared type of a result -> one that states nothing


def differences(interface: type) -> list[str]:
    """Differences of SGLang's interface from METHODS, for people; empty if there are none."""
    abstract = set(getattr(interface, "__abstractmethods__", ()))
    found = [f"a new method {name}" for name in sorted(abstract - METHODS.keys())]
    found += [f"no method {name}" for name in sorted(METHODS.keys() - abstract)]
    for name in sorted(abstract & METHODS.keys()):
        parameters = tuple(inspect.signature(getattr(interface, name)).parameters)[1:]
        if parameters != METHODS[name]:
            found.append(f"{name} takes {', '.join(parameters) or 'nothing'}")
    return found


def without_cache(interface: type, why: str, layer_done_counter: Callable[[], Any]) -> type:
    """A linker that finds and stores nothing, whatever SGLang calls it with."""

    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        log.warning("kvserver: this engine runs without cache: %s", why)
        self.layer_done_counter = layer_done_counter()
        self.pools = {}

    def method(name: str) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            return copy(_RESULTS[name] if name in _RESULTS else _empty(interface, name))

        return call

    names = {*METHODS, *getattr(interface, "__abstractmethods__", ())}
    return type("KVServerLinker", (interface,), {"__init__": construct, **{name: method(name) for name in names}})


def _empty(interface: type, name: str) -> Any:
    declared = str(getattr(getattr(interface, name, None), "__annotations__", {}).get("return", ""))
    return next((value for kind, value in _OF_TYPE.items() if declared.startswith(kind)), False)
