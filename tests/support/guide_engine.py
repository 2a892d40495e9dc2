"""`python -m support.guide_engine ENDPOINT`: a made-up engine in a process of its own, for the commands of guides.

It has stored, found and loaded a chunk, stored two of the session agent-7, and ended a request, when it prints its line; it stays until it is ended.
"""

from __future__ import annotations

import signal
import sys

from .worker import Worker, make_keys


def main(endpoint: str) -> None:
    with Worker(endpoint, instance_id="guide-1") as worker:
        worker.send(worker.description(hash_algorithm="sha256", hash_start=b"s" * 32, hash_block_tokens=16))
        worker.round_trip()
        worker.store(make_keys(2), worker.blocks_for(2), session_id="agent-7")
        keys = make_keys(2)
        worker.lookup(keys, "cmpl-guide", tokens=2 * worker.hello.chunk_tokens)
        worker.end_request(
            "cmpl-guide", prompt_tokens=2 * worker.hello.chunk_tokens, local_tokens=0, loaded_tokens=0, loads=0
        )
        worker.client.hello()  # answered behind the notice
        print("ready", flush=True)
        signal.pause()


if __name__ == "__main__":
    main(sys.argv[1])
