#!/usr/bin/env bash
# SGLang 0.5.23 on CPUs (attention backend torch_native), with a pool of its own for layers with a sliding window: it writes their KV at the
# pool's own slots, and reads it at the slots of full attention. Both pools hand out equal slots in a new engine. Once a window has passed
# the tokens of one request, and another request was evicted, they differ. Then layers with a window compute with other tokens' KV.
#
# Valid input: SGLang's pools, allocator, layers and backend. One prompt is prefilled three times: in a new engine, at equal slots that
# another prompt had, and at slots that differ. Its queries, keys and values are the same each time, so its outputs should be.
#
# Needs Python 3.11; installs torch 2.13.0 and sglang 0.5.23 without its dependencies into a temporary folder, some 2 GB.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
pip=("$folder/venv/bin/pip" install -q --disable-pip-version-check -c "$root/tests/constraints.txt")
"${pip[@]}" torch
"${pip[@]}" -r "$root/tests/vllm/requirements.txt"
"${pip[@]}" --no-deps compressed-tensors xgrammar
"${pip[@]}" --no-deps -r "$root/tests/sglang/requirements.txt"

# SGLang imports compiled kernels that this backend does not call. The stand-in of tests/support would correct the backend.
mkdir "$folder/modules" "$folder/modules/sgl_kernel"
cp -r "$root/tests/support/sglang/IPython" "$root/tests/support/sglang/torchvision" "$folder/modules/"
cat >"$folder/modules/sgl_kernel/__init__.py" <<'PYTHON'
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return None  # a call of it raises
PYTHON

cat >"$folder/slots.py" <<'PYTHON'
from importlib.metadata import version
from types import SimpleNamespace

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

PROMPT, HEADS, DIM, WINDOW = 40, 2, 8, 16
TOKENS = 3 * PROMPT
print(f"SGLang {version('sglang')}, torch {torch.__version__.split('+')[0]}")
common = dict(page_size=1, dtype=torch.float32, device="cpu")
pool = SWAKVPool(TOKENS, TOKENS, swa_attention_layer_ids=[0], full_attention_layer_ids=[1], head_num=HEADS, head_dim=DIM,
                 enable_memory_saver=False, **common)  # fmt: skip
allocator = SWATokenToKVPoolAllocator(TOKENS, TOKENS, kvcache=pool, need_sort=False, **common)
requests = ReqToTokenPool(1, TOKENS, "cpu", False)
backend = TorchNativeAttnBackend(SimpleNamespace(device="cpu", req_to_token_pool=requests, token_to_kv_pool=pool))
layers = {
    "a window": RadixAttention(HEADS, DIM, DIM**-0.5, HEADS, layer_id=0, sliding_window_size=WINDOW),
    "full attention": RadixAttention(HEADS, DIM, DIM**-0.5, HEADS, layer_id=1),
}


def prefill(seed):
    """Each layer's output for the prompt of this seed at slots that were free, and the slots."""
    slots = allocator.alloc(PROMPT)
    requests.req_to_token[0, :PROMPT] = slots
    batch = SimpleNamespace(
        out_cache_loc=slots, req_pool_indices=torch.tensor([0]), seq_lens=torch.tensor([PROMPT]), encoder_lens=None,
        extend_prefix_lens=torch.tensor([0]), extend_seq_lens=torch.tensor([PROMPT]),
    )  # fmt: skip
    backend.init_forward_metadata(batch)
    q, k, v = torch.randn(3, PROMPT, HEADS, DIM, generator=torch.Generator().manual_seed(seed))
    return {name: backend.forward_extend(q, k, v, layer, batch) for name, layer in layers.items()}, slots


def compare():
    outputs, slots = prefill(seed=0)
    equal = slots.equal(pool.translate_loc_from_full_to_swa(slots))
    print(f"the pool of windows has the prompt at {'the same' if equal else 'other'} slots")
    for name, output in outputs.items():
        wrong = (~torch.isclose(output, expected[name], atol=1e-5)).flatten(1).any(1).sum()
        print(f"  layer with {name}: outputs of {wrong} of {PROMPT} tokens differ from a new engine's")


expected, _ = prefill(seed=0)
allocator.clear()
(_, evicted), (_, passed), _ = prefill(seed=1), prefill(seed=2), prefill(seed=3)
allocator.free(evicted)
compare()
allocator.clear()
(_, evicted), (_, passed), _ = prefill(seed=1), prefill(seed=2), prefill(seed=3)
allocator.free_swa(passed)  # its tokens are behind the window: full attention keeps them
allocator.free(evicted)
compare()
PYTHON

cat >"$folder/expected" <<'OUTPUT'
SGLang 0.5.23, torch 2.13.0
the pool of windows has the prompt at the same slots
  layer with a window: outputs of 0 of 40 tokens differ from a new engine's
  layer with full attention: outputs of 0 of 40 tokens differ from a new engine's
the pool of windows has the prompt at other slots
  layer with a window: outputs of 40 of 40 tokens differ from a new engine's
  layer with full attention: outputs of 0 of 40 tokens differ from a new engine's
OUTPUT

cd "$folder"
PYTHONPATH=modules SGLANG_USE_CPU_ENGINE=1 venv/bin/python slots.py 2>errors | tee seen || cat errors
diff expected seen || { cat errors; echo "this is no longer what the finding states"; exit 1; }
