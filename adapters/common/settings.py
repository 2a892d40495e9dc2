"""Settings that any engine's adapter has, and how an engine's extra configuration is read.

Owns: the keys, their defaults and costs. Refuses to know: which parts use them.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from kvserver.protocol import TENANT, allowed_values, default_endpoint, failed_field

PREFIX = "kvserver."


class CommonSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings by key: field `load_timeout_ms` is the key `kvserver.load_timeout_ms`."""

    endpoint: Annotated[
        str,
        Meta(
            description="The daemon's endpoint. Default: the endpoint of a daemon that the same user started with defaults."
        ),
    ] = ""
    lookup_timeout_ms: Annotated[
        float,
        Meta(
            gt=0,
            description="How long a request may wait for the answer to its lookup, over several scheduler passes. After that the lookup is a miss.",
        ),
    ] = 100.0
    lookup_poll_ms: Annotated[
        float,
        Meta(
            gt=0,
            description="How long the scheduler waits for lookups in one pass, all requests together. With SGLang the time in which lookups are begun counts, too.",
        ),
    ] = 1.0
    lookup_age_ms: Annotated[
        float,
        Meta(
            gt=0,
            description="How old the answer to a lookup may be when the engine admits the request. The lookup is sent again if the answer is older than this, or than half the daemon's lease.",
        ),
    ] = 1_000.0
    fill_timeout_ms: Annotated[
        float,
        Meta(
            ge=0,
            le=10_000,
            description="How long a request may wait until the daemon has read from its storage (L2) what its lookup missed, or until a running store has brought it; other requests run meanwhile. A store that another engine has announced must begin within half of it. If the daemon does not answer either, half a second more. 0: never.",
        ),
    ] = 2_000.0
    load_timeout_ms: Annotated[
        float, Meta(gt=0, description="After this time a load is cancelled, and the engine computes the tokens.")
    ] = 10_000.0
    store_timeout_ms: Annotated[
        float,
        Meta(
            gt=0,
            description="After this time a store is cancelled. Until a store has ended, an idle engine keeps stepping to receive the report of its end.",
        ),
    ] = 10_000.0
    connect_timeout_ms: Annotated[
        float, Meta(gt=0, description="How long the engine's start waits for its registration with the daemon.")
    ] = 5_000.0
    unregister_timeout_ms: Annotated[
        float,
        Meta(
            gt=0,
            description="How long sleep mode waits for the daemon to close its mappings of the KV cache. After that sleep fails if a load may still write; if none may, sleep goes on and the GPU memory is free once the daemon has closed its mappings.",
        ),
    ] = 5_000.0
    tenant: Annotated[
        str,
        Meta(
            pattern=TENANT,
            description="The tenant to whom the engine's chunks belong, if the daemon has a `--share tenant:NAME` for it: up to 64 letters, digits, dots, hyphens and underscores. It keeps a part of L1 and isolates nothing: tenants share prefixes, and cache salts do not.",
        ),
    ] = ""


S = TypeVar("S", bound=CommonSettings)


def read_settings(kind: type[S], extra_config: dict[str, Any]) -> S:
    """The adapter's settings among an engine's extra configuration. ValueError names the key and what to write."""
    known = {field.name for field in msgspec.structs.fields(kind)}
    values = {key.removeprefix(PREFIX): value for key, value in extra_config.items() if key.startswith(PREFIX)}
    if unknown := sorted(set(values) - known):
        names = [", ".join(PREFIX + name for name in sorted(some)) for some in (unknown, known)]
        raise ValueError(f"unknown keys: {names[0]}; known are {names[1]}")
    try:
        settings = msgspec.convert(values, kind, strict=False)
    except msgspec.ValidationError as error:
        name = failed_field(error)
        raise ValueError(f"{PREFIX + name} {values[name]!r}: write {allowed_values(kind, name)}") from None
    return settings if settings.endpoint else msgspec.structs.replace(settings, endpoint=default_endpoint())
