"""What an operator may set in `kv_connector_extra_config`, each key once.

Owns: the keys, their defaults and costs. Refuses to know: who uses them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from kvserver.config import default_endpoint

PREFIX = "kvserver."
Milliseconds = Annotated[float, Meta(gt=0)]


class AdapterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Field `load_timeout_ms` is the key `kvserver.load_timeout_ms`."""

    endpoint: str = ""
    # How long a request may wait for the answer to its lookup, over several scheduler passes. Then: a miss.
    lookup_timeout_ms: Milliseconds = 100.0
    # How long the scheduler waits for lookups in one pass, all requests together.
    lookup_poll_ms: Milliseconds = 1.0
    # After this a load is cancelled and its request computes the tokens itself.
    load_timeout_ms: Milliseconds = 10_000.0
    # After this a store is cancelled. Until then an idle engine keeps stepping to hear of its end.
    store_timeout_ms: Milliseconds = 10_000.0
    # How long a worker step waits for stores whose blocks are about to be overwritten, before it cancels them.
    settle_ms: Milliseconds = 20.0
    # How long the engine's start waits for its registration.
    connect_timeout_ms: Milliseconds = 5_000.0
    # What vLLM does with a request whose load failed. vLLM's own default, "fail", ends it with an error.
    load_failure_policy: Literal["recompute", "fail"] = "recompute"
    # Names the weights. Set anew before reset_cache it says that these weights may be shared again.
    weights_version: str = ""


def read_settings(extra_config: dict[str, Any]) -> AdapterSettings:
    """From `kv_connector_extra_config`; msgspec.ValidationError or ValueError names the key."""
    known = {field.name for field in msgspec.structs.fields(AdapterSettings)}
    values = {key.removeprefix(PREFIX): value for key, value in extra_config.items() if key.startswith(PREFIX)}
    if unknown := sorted(set(values) - known):
        raise ValueError(
            f"unknown keys {[PREFIX + key for key in unknown]}; known are {sorted(PREFIX + k for k in known)}"
        )
    settings = msgspec.convert(values, AdapterSettings, strict=False)
    return settings if settings.endpoint else msgspec.structs.replace(settings, endpoint=default_endpoint())
