#!/usr/bin/env bash
# obstore 0.12.1: where a part of a multipart put fails and the upload cannot be aborted either, the error that is raised is that of the
# abort. Status and code of the put's own error are nowhere in it, nor in its causes.
#
# Valid input: a put in parts to a bucket that is full (507 for a part), by a key without AbortMultipartUpload (403 for the abort). Where
# the abort is answered with 204, the error is that of the part.
#
# Needs Python 3.11; installs obstore 0.12.1 into a temporary folder. The server is a few lines of Python.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check obstore==0.12.1

cat >"$folder/puts.py" <<'PYTHON'
import threading
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version

import obstore
from obstore.store import S3Store

PART = 5 << 20
abort_status = 204


class Bucket(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self, status, body=b""):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self):  # the upload begins
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.answer(200, b"<InitiateMultipartUploadResult><UploadId>1</UploadId></InitiateMultipartUploadResult>")

    def do_PUT(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(507, b"<Error><Code>StorageFull</Code></Error>")

    def do_DELETE(self):
        self.answer(abort_status, b"" if abort_status == 204 else b"<Error><Code>AccessDenied</Code></Error>")

    def log_message(self, *_):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Bucket)
threading.Thread(target=server.serve_forever, daemon=True).start()
store = S3Store(
    "bucket",
    config={"endpoint": f"http://127.0.0.1:{server.server_port}", "access_key_id": "a", "secret_access_key": "b", "region": "us-east-1"},
    client_options={"allow_http": True},
    retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=5)},
)
print("obstore", version("obstore"))
for abort_status in (204, 403):
    try:
        obstore.put(store, "object", bytes(2 * PART), use_multipart=True, chunk_size=PART, max_concurrency=1)
    except Exception as error:
        texts = []
        while error is not None:
            texts.append(f"{type(error).__name__} {error}")
            error = error.__cause__ or error.__context__
        raised = " ".join(texts)
    found = [name for name in ("PUT", "DELETE", "507", "StorageFull", "403", "AccessDenied") if name in raised]
    print(f"abort answered with {abort_status}:", *found)
server.shutdown()
PYTHON

cat >"$folder/expected" <<'OUTPUT'
obstore 0.12.1
abort answered with 204: PUT 507 StorageFull
abort answered with 403: DELETE 403 AccessDenied
OUTPUT

cd "$folder" && venv/bin/python puts.py | tee seen
diff expected seen || { echo "this is no longer what the finding states"; exit 1; }
