#!/usr/bin/env bash
# ai-dynamo-runtime 1.6.1, `python -m dynamo.indexer`: a BlockStored with `ownership`, which vLLM has since 0.27 for secondary tiers, is dropped
# without a word in the log, whatever its value. With `locality` REMOTE it is dropped as well; with LOCAL, or without both, it is read.
# A batch with block hashes in bytes is refused whole, with a warning.
#
# Valid input: events as vLLM 0.32's structs encode them.
#
# Needs Python 3.11; installs ai-dynamo-runtime 1.6.1, pyzmq and msgspec into a temporary folder.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check ai-dynamo-runtime==1.6.1 pyzmq==27.1.0 msgspec==0.20.0

cat >"$folder/ownership.py" <<'PYTHON'
import json
import socket
import subprocess
import sys
import time
import urllib.request
from importlib.metadata import version

import msgspec
import zmq

CASES = [
    ("neither", {}, True),
    ("locality LOCAL", {"locality": "LOCAL"}, True),
    ("locality REMOTE", {"locality": "REMOTE"}, False),
    ("ownership kvcr", {"ownership": "kvcr"}, False),
    ("ownership of another name", {"ownership": "tier"}, False),
    ("hashes in bytes", {"block_hashes": [bytes(32)]}, False),
]


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def post(path, **body):
    request = urllib.request.Request(f"{url}{path}", json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.loads(answer.read())


port, endpoint = free_port(), f"tcp://127.0.0.1:{free_port()}"
url = f"http://127.0.0.1:{port}"
indexer = subprocess.Popen([sys.executable, "-m", "dynamo.indexer", "--port", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
publisher = zmq.Context.instance().socket(zmq.PUB)
publisher.setsockopt(zmq.LINGER, 0)
publisher.bind(endpoint)
try:
    for _ in range(100):
        try:
            post("/register", instance_id=1, endpoint=endpoint, model_name="m", block_size=4)
            break
        except OSError:
            time.sleep(0.1)
    time.sleep(2)  # for the indexer to connect
    print("ai-dynamo-runtime", version("ai-dynamo-runtime"))
    seen = []
    for number, (name, fields, _) in enumerate(CASES):
        tokens = [*range(100 * number, 100 * number + 4)]
        event = {"type": "BlockStored", "block_hashes": [number + 1], "parent_block_hash": None, "token_ids": tokens, "block_size": 4, "medium": "CPU"}
        payload = msgspec.msgpack.encode([time.time(), [event | fields], 0])
        publisher.send_multipart([b"", number.to_bytes(8, "big"), payload])
        time.sleep(0.5)
        seen.append(bool(post("/query", token_ids=tokens, model_name="m")["instances"]))
        print(f"{name}: {'read' if seen[-1] else 'dropped'}")
finally:
    indexer.terminate()
    indexer.wait()
assert seen == [read for _, _, read in CASES], "this is no longer what the finding states"
PYTHON
"$folder/venv/bin/python" "$folder/ownership.py"
