"""What an operator may set in `kv_connector_extra_config`, each key once.

Owns: the keys, their defaults and costs. Refuses to know: who uses them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from kvserver.protocol import default_endpoint

PREFIX = "kvserver."


class AdapterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Field `load_timeout_ms` is the key `kvserver.load_timeout_ms`."""

    endpoint: Annotated[
        str,
        Meta(
            description="Where the daemon is. Without it: where a daemon lives that the same user started with defaults."
        ),
    ] = ""
    lookup_timeout_ms: Annotated[
        float,
        Meta(
            gt=0,
            description="How long a request may wait for the answer to its lookup, over several scheduler passes. Then: a miss.",
        ),
    ] = 100.0
    lookup_poll_ms: Annotated[
        float, Meta(gt=0, description="How long the scheduler waits for lookups in one pass, all requests together.")
    ] = 1.0
    lookup_age_ms: Annotated[
        float,
        Meta(
            gt=0,
            description="How old the answer to a lookup may be when vLLM admits its request, which may have waited long. An older one is asked for anew; the daemon's lease, if it is less than twice that, makes it earlier.",
        ),
    ] = 1_000.0
    load_timeout_ms: Annotated[
        float, Meta(gt=0, description="After this a load is cancelled and its request computes the tokens itself.")
    ] = 10_000.0
    store_timeout_ms: Annotated[
        float,
        Meta(
            gt=0,
            description="After this a store is cancelled. Until then an idle engine keeps stepping to hear of its end.",
        ),
    ] = 10_000.0
    settle_ms: Annotated[
        float,
        Meta(
            gt=0,
            description="How long a worker step waits for stores whose blocks are about to be overwritten, before it cancels them.",
        ),
    ] = 20.0
    connect_timeout_ms: Annotated[
        float, Meta(gt=0, description="How long the engine's start waits for its registration.")
    ] = 5_000.0
    unregister_timeout_ms: Annotated[
        float,
        Meta(
            gt=0,
            description="How long sleep mode waits for the daemon to let go of the KV cache. Then: sleep fails if a load may still write, else the GPU memory is free once the daemon lets go.",
        ),
    ] = 5_000.0
    load_interval_ms: Annotated[
        float,
        Meta(
            ge=0,
            le=86_400_000,
            description="How often the engine's load is told, for routers and dashboards, by vLLM's stat logger plugin. 0: never.",
        ),
    ] = 1_000.0
    load_failure_policy: Annotated[
        Literal["recompute", "fail"],
        Meta(
            description='What vLLM does with a request whose load failed. vLLM\'s own default, "fail", ends it with an error.'
        ),
    ] = "recompute"
    model_version: Annotated[
        str,
        Meta(
            max_length=200,
            description="Names weights that have no files in the model's folder (s3://, tensorizer, dummy): engines with one name share KV. Without it such an engine shares with no other. Where there are files both count.",
        ),
    ] = ""
    trust_multi_modal_uuids: Annotated[
        bool,
        Meta(
            description="Says that multi_modal_uuids, if requests have them, name the same image, video or sound in every engine and at any time. Without it the KV of prompts with such items is shared with no other engine: nothing tells a user's name from a hash of the content."
        ),
    ] = False
    weights_version: Annotated[
        str,
        Meta(
            description="Names the weights. Set anew before a reset of the prefix cache it says that these weights may be shared again."
        ),
    ] = ""
    on_prefix_reset: Annotated[
        Literal["private", "keep"],
        Meta(
            description="What a reset of the prefix cache says of the weights where it does not reach the connector: `private`, they may have changed in place, so the engine shares KV with itself only from then on; `keep`, they are the same, as in benchmarks. With vLLM's `weight_transfer_config` it is always `private`."
        ),
    ] = "private"


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
