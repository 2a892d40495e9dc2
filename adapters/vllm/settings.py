"""Settings in `kv_connector_extra_config`, beside those of any engine.

Owns: the keys, their defaults and costs. Refuses to know: which parts use them.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from kvserver.adapters.common.settings import CommonSettings


class AdapterSettings(CommonSettings, frozen=True, kw_only=True):
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
    weights_digest: Annotated[
        Literal["samples", "whole"],
        Meta(
            description="How the files of local models and LoRAs are compared. `samples` of their content take a second, and such KV goes to no L2 tier that machines share, unless `kvserver.model_version` names a model. `whole`: every byte is read (once, it is remembered by inode, size and time of change) before the engine registers; requests with a LoRA run without cache until its files were read. Set it in all engines that are to share."
        ),
    ] = "samples"
    store_generated: Annotated[
        bool,
        Meta(
            description="Whether KV of generated tokens is stored, with which the next turn of a conversation begins. If false, only prompts are stored."
        ),
    ] = True
    trust_multi_modal_uuids: Annotated[
        bool,
        Meta(
            description="Set to true if multi_modal_uuids in requests name the same image, video or sound in every engine and at any time. If false, the KV of prompts with such items is shared with no other engine, since a user's name cannot be distinguished from a hash of the content."
        ),
    ] = False
    trust_request_pins: Annotated[
        bool,
        Meta(
            description="Set to true if every client of this engine may pin prompts in L1 (`kvserver.pin_seconds`), within the daemon's `--pin-share`, and may name the tenant to whom its chunks belong (`kvserver.tenant`). If false, such wishes are counted and do nothing."
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
    on_sleep: Annotated[
        Literal["private", "keep"],
        Meta(
            description="What vLLM's sleep means. `private`: the weights may be others after wake-up, as a trainer's are, so from then on the engine shares KV with itself only, unless a new `kvserver.weights_version` was set before the sleep. `keep`: after wake-up the weights are the same, and what was stored before is found again. A reset of the prefix cache that is not part of a sleep counts as it does without. With vLLM's `weight_transfer_config` always `private`."
        ),
    ] = "private"
