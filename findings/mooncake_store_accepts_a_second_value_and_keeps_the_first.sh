#!/usr/bin/env bash
# Mooncake Store 0.3.13.post1: put() of a key that exists returns 0, as if it had been written, and the first value stays. Only another
# family of calls, upsert, replaces a value. remove() of a key that was just put or read refuses with -706 for some seconds.
#
# Valid input: one master, one client with a segment of 64 MiB over TCP, keys and values of a few bytes.
#
# Needs Python 3.11; installs mooncake-transfer-engine-non-cuda 0.3.13.post1 (and the system's libibverbs, libnuma) into a temporary folder.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
root=$(cd "$(dirname "$0")/.." && pwd)
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check mooncake-transfer-engine-non-cuda==0.3.13.post1
(cd "$folder" && bash "$root/.ci/mooncake_libs.sh" venv)

cat >"$folder/put.py" <<'PYTHON'
import os
import socket
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

from mooncake.store import MooncakeDistributedStore


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


rpc, metadata = free_port(), free_port()
master = subprocess.Popen(
    [Path(sys.executable).parent / "mooncake_master", f"--port={rpc}", "--rpc_address=127.0.0.1", f"--metrics_port={free_port()}",
     "--enable_http_metadata_server=true", "--http_metadata_server_host=127.0.0.1", f"--http_metadata_server_port={metadata}"],
    stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
try:
    for port in (rpc, metadata):
        for _ in range(100):
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                time.sleep(0.1)
    store = MooncakeDistributedStore()
    assert store.setup({"local_hostname": "127.0.0.1", "metadata_server": f"http://127.0.0.1:{metadata}/metadata", "global_segment_size": str(64 << 20),
                        "local_buffer_size": str(16 << 20), "protocol": "tcp", "rdma_devices": "", "master_server_addr": f"127.0.0.1:{rpc}"}) == 0  # fmt: skip
    print("mooncake-transfer-engine-non-cuda", version("mooncake-transfer-engine-non-cuda"))
    print("put one:", store.put("key", b"one"))
    print("put two:", store.put("key", b"two"))
    print("get:", store.get("key"))
    print("remove at once:", store.remove("key"))
    deadline = time.monotonic() + 60
    while (code := store.remove("key")) and time.monotonic() < deadline:
        time.sleep(0.2)
    print("remove later:", code)
    print("put two:", store.put("key", b"two"))
    print("get:", store.get("key"))
    sys.stdout.flush()
finally:
    master.kill()
    master.wait()
os._exit(0)  # the client's threads look for their master
PYTHON

cat >"$folder/expected" <<'OUTPUT'
mooncake-transfer-engine-non-cuda 0.3.13.post1
put one: 0
put two: 0
get: b'one'
remove at once: -706
remove later: 0
put two: 0
get: b'two'
OUTPUT

cd "$folder" && venv/bin/python put.py 2>/dev/null | tee seen
diff expected seen || { echo "this is no longer what the finding states"; exit 1; }
