#!/usr/bin/env bash
# vllm-router 0.1.17, policy `kv_aware` with `--kv-event-source`: batches of KV events are read only if their topic is empty, vLLM's default.
# vLLM's `--kv-events-config` may name a topic; the router has no flag for it, and drops those batches without a warning: its choice is a guess.
# Events of KV cache groups other than 0 are not used either, whatever their kind.
#
# Valid input: batches as vLLM 0.32 publishes them, and two HTTP servers in the place of engines.
#
# Needs Python 3.11; installs vllm-router 0.1.17, pyzmq and msgspec into a temporary folder.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check vllm-router==0.1.17 pyzmq==27.1.0 msgspec==0.20.0

cat >"$folder/topic.py" <<'PYTHON'
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version

import msgspec
import zmq

PROMPTS = 24
CASES = [(b"", 0, True), (b"kv-events", 0, False), (b"", 1, False)]  # topic, group, and whether all prompts go to the engine that has them


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


class Worker(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer({})

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.answer({"id": "x", "object": "text_completion", "created": 1, "model": "m", "choices": [{"text": str(self.server.server_port), "index": 0}]})

    def answer(self, body):
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


def chosen(tokens):
    body = json.dumps({"model": "m", "prompt": tokens, "max_tokens": 1}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return ports.index(int(json.loads(answer.read())["choices"][0]["text"]))


workers = [ThreadingHTTPServer(("127.0.0.1", 0), Worker) for _ in range(2)]
for worker in workers:
    threading.Thread(target=worker.serve_forever, daemon=True).start()
ports = [worker.server_port for worker in workers]
urls, endpoints = [f"http://127.0.0.1:{port}" for port in ports], [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
publishers = [zmq.Context.instance().socket(zmq.PUB) for _ in range(2)]
for publisher, endpoint in zip(publishers, endpoints):
    publisher.setsockopt(zmq.LINGER, 0)
    publisher.bind(endpoint)
port = free_port()
url = f"http://127.0.0.1:{port}"
command = [os.path.join(os.path.dirname(sys.executable), "vllm-router"), "--port", str(port), "--prometheus-port", str(free_port()), "--policy", "kv_aware"]
command += ["--worker-urls", *urls, "--worker-startup-check-interval", "1", "--kv-event-block-size", "4", "--kv-event-model", "m"]
for each, endpoint in zip(urls, endpoints):
    command += ["--kv-event-source", f"{each}={endpoint}"]
router = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
try:
    for _ in range(100):
        try:
            urllib.request.urlopen(f"{url}/health", timeout=1)
            break
        except OSError:
            time.sleep(0.1)
    time.sleep(2)  # for the router to subscribe
    print("vllm-router", version("vllm-router"))
    numbers, seen = [0, 0], []
    for case, (topic, group, _) in enumerate(CASES):
        prompts = [[*range(first, first + 8)] for first in range(10_000 * case, 10_000 * case + 8 * PROMPTS, 8)]
        for at, tokens in enumerate(prompts):
            event = {"type": "BlockStored", "block_hashes": [tokens[0] + 1, tokens[1] + 1], "parent_block_hash": None, "token_ids": tokens}
            event |= {"block_size": 4, "lora_id": None, "medium": "GPU", "lora_name": None, "group_idx": group, "kv_cache_spec_kind": "full_attention"}
            payload = msgspec.msgpack.encode([time.time(), [event], 0])
            publishers[at % 2].send_multipart([topic, numbers[at % 2].to_bytes(8, "big"), payload])
            numbers[at % 2] += 1
        time.sleep(1)
        right = sum(chosen(tokens) == at % 2 for at, tokens in enumerate(prompts))
        seen.append(right == PROMPTS)
        print(f"topic {topic.decode()!r}, group {group}: {right} of {PROMPTS} requests go to the engine that has the prompt")
finally:
    router.terminate()
    router.wait()
assert seen == [right for _, _, right in CASES], "this is no longer what the finding states"
PYTHON
"$folder/venv/bin/python" "$folder/topic.py"
