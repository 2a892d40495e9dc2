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
        float, Meta(gt=0, description="How long the scheduler waits for lookups in one pass, all requests together.")
    ] = 1.0
    lookup_age_ms: Annotated[
        float,
        Meta(
            gt=0,
            description="How old the answer to a lookup may be when vLLM admits the request. The lookup is sent again if the answer is older than this, or than half the daemon's lease.",
        ),
    ] = 1_000.0
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
    settle_ms: Annotated[
        float,
        Meta(
            gt=0,
            description="How long a worker step waits for stores whose blocks are about to be overwritten, before it cancels the stores.",
        ),
    ] = 20.0
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
    load_interval_ms: Annotated[
        float,
        Meta(
            ge=0,
            le=86_400_000,
            description="How often vLLM's stat logger plugin sends the engine stats to the daemon, for routers and dashboards. 0: never.",
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
            description="Names weights that have no files in the model's folder (s3://, tensorizer, dummy): engines with the same name share KV. Without a name such an engine shares KV with no other. Where there are files, both the files and the name must agree.",
        ),
    ] = ""
    trust_multi_modal_uuids: Annotated[
        bool,
        Meta(
            description="Set to true if multi_modal_uuids in requests name the same image, video or sound in every engine and at any time. If false, the KV of prompts with such items is shared with no other engine, since a user's name cannot be distinguished from a hash of the content."
        ),
    ] = False
    weights_version: Annotated[
        str,
        Meta(
            description="Names the weights. A new name, set before a reset of the prefix cache, lets the engine share the KV of these weights again."
        ),
    ] = ""
    on_prefix_reset: Annotated[
        Literal["private", "keep"],
        Meta(
            description="What a reset of the prefix cache means where vLLM does not pass the reset on to the connector. `private`: the weights may have changed in place, so from then on the engine shares KV with itself only. `keep`: the weights are the same, as in benchmarks. With vLLM's `weight_transfer_config` always `private`."
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
