"""Memory of a Valkey server that an object uses beside its bytes, as `maxmemory` counts it.

    .venv/bin/python bench/l2_memory.py [--server BINARY]

The server is that of the tests, or BINARY; it starts empty. Numbers are bytes of an object. Objects are put by the daemon's own tier. `beside`: growth of `used_memory`, without
what the server keeps for its clients, over the objects put, less the bytes of one object. `header`: what a value has beside these bytes.
`rounded`: what the allocator adds to a value; `rest`: the name and the server's entry for it.
"""

from __future__ import annotations

import argparse
import select
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import support.valkey
from common import table
from support.l1_memory import PAGE, name, within
from support.shared_tiers import TierDaemon
from support.valkey import ValkeyStore

from kvserver.l2 import TierOutcome

SIZES = (4 << 10, 64 << 10, 72 << 10, 1 << 20, 2 << 20)  # bytes of an object
AT_ONCE, TOTAL_BYTES = 16, 128 << 20
RESIZE_SECONDS = 1.5  # the server resizes its table and its clients' buffers meanwhile


def used(client: Any) -> int:
    memory = client.info("memory")
    return int(memory["used_memory"]) - int(memory["mem_clients_normal"])


def put(daemon: TierDaemon, size: int, count: int) -> None:
    objects, numbers, waiting = [daemon.l1.object(size) for _ in range(AT_ONCE)], iter(range(count)), 0
    done = 0
    while done < count:
        while waiting < AT_ONCE and (number := next(numbers, None)) is not None:
            daemon.tier.put(name(number), objects[number % AT_ONCE], b"", within(100))
            waiting += 1
        select.select([daemon.tier.completion_fd], [], [], 1)
        for end in daemon.tier.drain():
            assert end.outcome is TierOutcome.DONE, end
            waiting, done = waiting - 1, done + 1


def measure(size: int, *parameters: str) -> tuple[str, list[object]]:
    """The server and its allocator; a row."""
    count = TOTAL_BYTES // (size + (4 << 10))
    with tempfile.TemporaryDirectory() as folder:
        store = ValkeyStore(Path(folder))
        daemon = TierDaemon(store.url_of("kvserver", *parameters), pages=4 * AT_ONCE * (size // PAGE + 4))
        try:
            daemon.until_open()
            daemon.probe([0])
            with store.client() as client:
                before = used(client)
                put(daemon, size, count)
                time.sleep(RESIZE_SECONDS)
                beside = (used(client) - before) / count - size
                where = store.objects()[0]
                header = client.strlen(where) - size
                client.set(where, b"")
                rest = client.memory_usage(where)  # of the name and its entry alone
                server = client.info("server")
                version = (
                    f"{server.get('server_name', 'redis')} {server.get('valkey_version') or server['redis_version']}"
                )
                allocator = client.info("memory")["mem_allocator"]
        finally:
            daemon.tier.close(within(5))
            store.close()
    return f"{version}, {allocator}", [
        size >> 10,
        " ".join(parameters) or "-",
        *map(round, (beside, header, beside - header - rest, rest)),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", help="the program to start, with jemalloc for example")
    if server := parser.parse_args().server:
        support.valkey.get_binary_path = lambda: Path(server)
    found = [measure(size) for size in SIZES] + [measure(SIZES[1], "expiry=7d")]
    print(found[0][0])
    print(table(["KiB", "parameters", "beside", "header", "rounded", "rest"], [row for _, row in found]))


if __name__ == "__main__":
    main()
