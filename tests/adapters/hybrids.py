"""Models of several KV cache groups, as today's are: small layers, and vLLM's own grouping of them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

WORD = torch.int64  # the made-up KV is made of


class Hybrid(NamedTuple):
    """`layers` in the order of the model; `kinds` of the object groups that they make, sorted."""

    layers: list[KVCacheSpec]
    kinds: list[str]
    block_size: int = 16  # of vLLM's configuration
    layout: str = "LBHNC"
    chunk: int = 64  # tokens
    num_blocks: int = 200  # enough for some prompts of five chunks
    few_blocks: int = 90  # requests wait, and are preempted
    runner: int = 1  # generation of vLLM's model runner

    @property
    def options(self) -> dict[str, Any]:
        """For make_engine."""
        return {
            "layers": self.layers,
            "block_size": self.block_size,
            "layout": self.layout,
            "num_blocks": self.num_blocks,
            "runner": self.runner,
        }


def full(block: int = 16, heads: int = 2) -> KVCacheSpec:
    return FullAttentionSpec(block_size=block, num_kv_heads=heads, head_size=1, dtype=WORD)


def window(tokens: int, block: int = 16, heads: int = 2) -> KVCacheSpec:
    return SlidingWindowSpec(block_size=block, num_kv_heads=heads, head_size=1, dtype=WORD, sliding_window=tokens)


def local(tokens: int) -> KVCacheSpec:
    return ChunkedLocalAttentionSpec(
        block_size=16, num_kv_heads=2, head_size=1, dtype=WORD, attention_chunk_size=tokens
    )


def mla(block: int = 16, size: int = 4, **more: Any) -> KVCacheSpec:
    return MLAAttentionSpec(block_size=block, num_kv_heads=1, max_tp_shards=1, head_size=size, dtype=WORD, **more)


def state(block: int, page: int) -> KVCacheSpec:
    """Convolution and recurrent state of a linear attention layer, in a page of the attention layers' size."""
    return MambaSpec(
        block_size=block,
        shapes=((3, 4), (4, 4)),
        dtypes=(WORD, WORD),
        page_size_padded=page,
        mamba_cache_mode="align",
    )


def ring(heads: int, size: int) -> KVCacheSpec:
    """Raw keys of a request's last 8 tokens, from which each four tokens' compressed key is computed."""
    return CircularBufferSpec(block_size=8, num_kv_heads=heads, head_size=size, head_size_v=0, dtype=WORD)


def latent_window(tokens: int, block: int, size: int, **more: Any) -> KVCacheSpec:
    return SlidingWindowMLASpec(
        block_size=block,
        num_kv_heads=1,
        max_tp_shards=1,
        head_size=size,
        dtype=WORD,
        sliding_window=tokens,
        alignment=512,
        **more,
    )


# DeepSeek V4: latents of 4 and of 128 tokens each, an indexer, a window, and the compressors' states: short windows.
FOUR = [mla(256, 8, tokens_per_state=4, alignment=512), mla(256, 2, tokens_per_state=4, alignment=512)]
FOUR_STATES = [latent_window(8, 4, 16), latent_window(8, 4, 4)]
MANY = [mla(256, 8, tokens_per_state=128, alignment=512), latent_window(128, 8, 8)]
DEEPSEEK_V4 = [
    latent_window(128, 64, 8),
    *[*FOUR, latent_window(128, 64, 8), *FOUR_STATES, *MANY, latent_window(128, 64, 8)] * 2,
]
# DeepSeek V4.1: its windows are computed again behind a hit, and its compressors have rings.
REPLAYS = "bounded_replay" in SlidingWindowMLASpec.__dataclass_fields__  # vLLM 0.32 and later
REPLAYED = latent_window(128, 32, 8, **{"bounded_replay": True} if REPLAYS else {})
DEEPSEEK_V41 = [REPLAYED, *[*FOUR, ring(1, 16), MANY[0], REPLAYED] * 2]

HYBRIDS = {
    "gpt-oss": Hybrid([window(24), full(), window(24), full()], ["full", "window"]),
    "long window": Hybrid([window(100), full(), window(100), full()], ["full", "window"]),
    # Windows' blocks have 32 tokens. The longest prompt needs 97 blocks at once; fewer, and it waits forever.
    "gemma": Hybrid([*[window(100, heads=1)] * 5, full(heads=2)], ["full", "window"], few_blocks=130),
    "llama4": Hybrid([*[local(96)] * 3, full()], ["full", "local"], few_blocks=120),
    "deepseek-v3.2": Hybrid(
        [mla(size=4), mla(size=1)] * 2, ["full"], layout="BLHNC", few_blocks=60
    ),  # MLA and its indexer
    "qwen3-next": Hybrid([*[state(32, 1024)] * 3, full(32)], ["full", "state"], block_size=32),
    "kimi-linear": Hybrid([*[state(64, 2048)] * 3, mla(64)], ["full", "state"], block_size=64),
    "deepseek-v4": Hybrid(
        DEEPSEEK_V4,
        ["full", "window", "window", "window"],
        block_size=256,
        layout="BLHNC",
        chunk=256,
        num_blocks=2000,
        few_blocks=700,
    ),
    "deepseek-v4.1": Hybrid(
        DEEPSEEK_V41,
        ["full"] if REPLAYS else ["full", "window"],
        block_size=256,
        layout="BLHNC",
        chunk=256,
        num_blocks=600,
        few_blocks=250,
        runner=2,
    ),
    "glm-5.3": Hybrid(
        [*[state(64, 2048)] * 2, mla(64, 4), mla(64, 1, tokens_per_state=4), ring(2, 1)],
        ["full", "state"],
        block_size=64,
        layout="BLHNC",
    ),
    "qwen4": Hybrid(
        [full(64), mla(64, 1, tokens_per_state=4), ring(1, 2)] * 2, ["full"], block_size=64, layout="BLHNC"
    ),
    "nemotron": Hybrid([state(32, 1024), window(50, 32), full(32)], ["full", "state", "window"], block_size=32),
}
