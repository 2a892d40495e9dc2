"""Settings in `linker_extra_config`, beside those of any engine.

Owns: the keys, their defaults and costs. Refuses to know: who uses them.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from kvserver.adapters.common.settings import CommonSettings


class SGLangSettings(CommonSettings, frozen=True, kw_only=True):
    engine_id: Annotated[
        str,
        Meta(
            max_length=512,
            description="The engine's name in metrics, `/status` and routers. Give each engine its own, the same at every start. Default: a new name at each start.",
        ),
    ] = ""
    load_wait_ms: Annotated[
        float,
        Meta(
            gt=0,
            le=10_000,
            description="How long SGLang's scheduler waits for one load at most. After that the load is cancelled, and the engine computes the tokens. On a GPU a load begins when the step that runs has ended; for that the scheduler waits as long again at most.",
        ),
    ] = 1_000.0
    load_share: Annotated[
        float,
        Meta(
            gt=0,
            description="How long the scheduler waits for one load at most, as a part of the time in which the engine would compute its tokens. Both rates are measured.",
        ),
    ] = 0.25
    model_version: Annotated[
        str,
        Meta(
            max_length=200,
            description="Names weights that have no files in the model's folder (remote loaders, dummy): engines with the same name share KV. Without a name such an engine shares KV with no other. Where there are files, both the files and the name must agree.",
        ),
    ] = ""
    weights_digest: Annotated[
        Literal["samples", "whole"],
        Meta(
            description="How the files of local models are compared. `samples` of their content take a second, and such KV goes to no L2 tier that machines share, unless `kvserver.model_version` names the model. `whole`: every byte is read before the engine registers. Set it in all engines that are to share."
        ),
    ] = "samples"
    on_prefix_reset: Annotated[
        Literal["private", "keep"],
        Meta(
            description="What a reset of the cache means: SGLang resets it for a flush and after new weights. `private`: the weights may have changed, so from the first reset on the engine shares KV with itself only. `keep`: the weights are the same, as in benchmarks."
        ),
    ] = "private"
