"""The connector's place in vLLM's configuration: by itself, or inside vLLM's MultiConnector.

MultiConnector gives each of its connectors a copy of the configuration with a kv_transfer_config of its own. vLLM reads the outer
one, and nothing leads to it from the copy. But vLLM's constructors call the connector's, so the outer one is found among the
callers' variables. This happens when the engine is set up, and at a reset, to find how far the reset goes. At no other time.

Owns: the way to the connector's own settings and to the outer configuration. Refuses to know: what is set or refused in them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

from kvserver.adapters.common.settings import read_settings
from kvserver.adapters.vllm.settings import AdapterSettings
from kvserver.adapters.vllm_plugin import NAME

WRAPPERS: tuple[type, ...] = (MultiConnector,)
# Connectors that bring back the bytes that were computed. Others may convert them (LMCache's serializers lose precision).
EXACT = (NAME, "MooncakeConnector", "NixlConnector", "OffloadingConnector", "SimpleCPUOffloadConnector")


def own_settings(transfer: Any) -> AdapterSettings | None:
    """The connector's settings in this kv_transfer_config; None if it does not configure the connector."""
    extra = _find(transfer.kv_connector, transfer.kv_connector_extra_config) if transfer is not None else None
    return read_settings(AdapterSettings, extra) if extra is not None else None


def _find(name: str | None, extra: dict[str, Any]) -> dict[str, Any] | None:
    if name == NAME:
        return extra
    for inner in extra.get("connectors") or ():
        found = _find(inner.get("kv_connector"), inner.get("kv_connector_extra_config") or {})
        if found is not None:
            return found
    return None


def has_inexact_siblings(outer: Any) -> bool:
    """True if a connector beside this one may load KV that no engine has computed so. `outer`: the configuration that vLLM reads."""
    return any(name not in EXACT for name in _names(outer.kv_connector, outer.kv_connector_extra_config or {}))


def is_the_only_one(outer: Any) -> bool:
    """False if MultiConnector has another kvserver connector: vLLM raises where two connectors answer with one key."""
    return list(_names(outer.kv_connector, outer.kv_connector_extra_config or {})).count(NAME) <= 1


def _names(name: str | None, extra: dict[str, Any]) -> Iterator[str | None]:
    """Names of all connectors that are no wrappers."""
    inner = extra.get("connectors")
    if name == NAME or not inner:
        yield name
        return
    for each in inner:
        yield from _names(each.get("kv_connector"), each.get("kv_connector_extra_config") or {})


def outer_transfer(own: Any) -> Any:
    """The kv_transfer_config that vLLM itself reads. REQUIRES: called while the connector is made, with its own one."""
    found = own
    for names in _callers():
        config = names.get("vllm_config")
        if config is not None and isinstance(names.get("self"), WRAPPERS):
            found = config.kv_transfer_config
    return found


def a_sibling_allocates() -> bool:
    """True if another connector of the calling MultiConnector may allocate the KV cache: vLLM ends an engine where two want to."""
    for names in _callers():
        if isinstance(names.get("self"), WRAPPERS):
            door = KVConnectorBase_V1.get_mem_pool_context
            others = [type(each) for each in names["self"]._connectors if type(each).__name__ != NAME]
            return any(other.get_mem_pool_context is not door for other in others)
    return False


def fails_requests() -> bool:
    """True if vLLM would end a request whose load failed; False if that cannot be seen.

    REQUIRES: called by vLLM's scheduler, or for it.
    """
    return any(getattr(names.get("self"), "recompute_kv_load_failures", True) is False for names in _callers())


def begins_again() -> Callable[[set[str]], Any] | None:
    """Function by which vLLM's scheduler begins requests again once their loads have ended; None if it has none.

    It is vLLM's own way after loads that failed (0.30 and later). REQUIRES: called by vLLM's scheduler, or for it.
    """
    if fails_requests():
        return None
    found = (getattr(names.get("self"), "_handle_failed_recving", None) for names in _callers())
    return next((each for each in found if each is not None), None)


def requests_in_error() -> set[str] | None:
    """Ids of requests that vLLM's scheduler is about to end with an error; None if it has no such set. REQUIRES: called by it."""
    names = ("encoder_cache_mismatch_reqs", "grammar_compile_error_reqs")  # the second before 0.32
    found = (getattr(caller.get("self"), name, None) for caller in _callers() for name in names)
    return next((each for each in found if isinstance(each, set)), None)


def resets_running_requests() -> bool:
    """True if vLLM resets its prefix cache at the cost of requests that have blocks. REQUIRES: called by the reset."""
    return any(names.get("reset_running_requests") is True for names in _callers())


def _callers() -> Iterator[Mapping[str, Any]]:
    """The variables of each function that is being called, from the innermost on."""
    frame = sys._getframe(1)
    while frame is not None:
        yield frame.f_locals
        if (outer := frame.f_back) is None:
            return
        frame = outer
