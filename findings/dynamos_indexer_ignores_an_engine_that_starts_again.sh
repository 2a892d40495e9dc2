#!/usr/bin/env bash
# ai-dynamo-runtime 1.6.1, `python -m dynamo.indexer`: vLLM numbers the batches of its KV events from 0 at each start. After a restart of the
# engine at the same address the indexer takes them for old ones, until they pass the last number that it knows. It ignores AllBlocksCleared
# as well, so that it names blocks which are in no memory, and no others.
#
# Valid input: batches as vLLM 0.32 publishes them, by one publisher after another at one address.
#
# Needs Python 3.11; installs ai-dynamo-runtime 1.6.1, pyzmq and msgspec into a temporary folder.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check ai-dynamo-runtime==1.6.1 pyzmq==27.1.0 msgspec==0.20.0

cat >"$folder/restart.py" <<'PYTHON'
import json
import socket
import subprocess
import sys
import time
import urllib.request
from importlib.metadata import version

import msgspec
import zmq


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def post(path, **body):
    request = urllib.request.Request(f"{url}{path}", json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.loads(answer.read())


class Engine:
    """vLLM's publisher: numbers from 0."""

    def __init__(self):
        self.socket, self.number = zmq.Context.instance().socket(zmq.PUB), 0
        self.socket.setsockopt(zmq.LINGER, 0)
        while True:
            try:
                self.socket.bind(endpoint)
                break
            except zmq.ZMQError:  # the address of the one before is not free yet
                time.sleep(0.1)
        time.sleep(3)  # for the indexer to connect

    def publish(self, *events):
        payload = msgspec.msgpack.encode([time.time(), events, 0])
        self.socket.send_multipart([b"", self.number.to_bytes(8, "big"), payload])
        self.number += 1

    def store(self, name, first):
        tokens = list(range(first, first + 4))
        self.publish({"type": "BlockStored", "block_hashes": [name], "parent_block_hash": None, "token_ids": tokens, "block_size": 4, "medium": "GPU"})


def found(what, engine):
    time.sleep(0.5)
    names = [first for first in (1, 2, 3) if post("/query", token_ids=[*range(100 * first, 100 * first + 4)], model_name="m")["instances"]]
    print(f"{what}, last number {engine.number - 1}: prompts that are found {names}")
    return names


port, endpoint = free_port(), f"tcp://127.0.0.1:{free_port()}"
url = f"http://127.0.0.1:{port}"
indexer = subprocess.Popen([sys.executable, "-m", "dynamo.indexer", "--port", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
try:
    for _ in range(100):
        try:
            post("/register", instance_id=1, endpoint=endpoint, model_name="m", block_size=4)
            break
        except OSError:
            time.sleep(0.1)
    print("ai-dynamo-runtime", version("ai-dynamo-runtime"))
    first = Engine()
    for _ in range(4):
        first.publish()
    first.store(1, 100)
    before = found("an engine with prompt 1", first)
    first.socket.close()
    second = Engine()
    second.publish({"type": "AllBlocksCleared"})
    second.store(2, 200)
    restarted = found("a new one, with prompt 2", second)
    for _ in range(3):
        second.publish()
    second.store(3, 300)
    passed = found("the same, with prompts 2 and 3", second)
finally:
    indexer.terminate()
    indexer.wait()
assert (before, restarted, passed) == ([1], [1], [1, 3]), "this is no longer what the finding states"
PYTHON
"$folder/venv/bin/python" "$folder/restart.py"
