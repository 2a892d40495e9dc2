"""How long kvserver takes to start and how much memory it uses then: the daemon, `kvserver status --help`, and what the
connector adds to an engine that has imported vLLM.

`.venv-vllm/bin/python bench/start.py`, with the daemon's command in KVSERVER_BIN; without vLLM the connector is left out
and a line states that. Medians, and the range, of RUNS processes each. Memory is the process's own (USS), L1 not touched.
"""

from __future__ import annotations

import importlib.util
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RUNS = 11
COMMAND = os.environ.get("KVSERVER_BIN") or str(Path(sys.executable).with_name("kvserver"))
CONNECTOR = """
import time
import vllm.distributed.kv_transfer.kv_connector.v1.base, vllm.v1.core.block_pool, vllm.v1.request, vllm.config
import vllm.v1.metrics.loggers, vllm.v1.core.kv_cache_utils, torch, zmq, msgspec, sys
def own():
    return sum(int(line.split()[1]) for line in open("/proc/self/smaps_rollup") if line.startswith("Private_"))
memory, modules, began = own(), set(sys.modules), time.perf_counter()
import kvserver.adapters.vllm
took = time.perf_counter() - began
print(took, own() - memory, sum(name.startswith("kvserver") for name in set(sys.modules) - modules))
"""


def own_kib(pid: int) -> int:
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return sum(int(kib) for kib in re.findall(r"^Private_\w+:\s+(\d+) kB", text, re.M))


def started() -> tuple[float, float]:
    """Seconds until the daemon prints that it is ready, and MiB of its own memory then."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        arguments = ("--endpoint", f"ipc://{folder}/kv.sock", "--http-port", "0", "--l1-size", "64MiB")
        daemon = subprocess.Popen([COMMAND, "serve", *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        try:
            assert daemon.stdout is not None
            assert b"ready" in daemon.stdout.readline(), "the daemon did not start"
            return time.perf_counter() - began, own_kib(daemon.pid) / 1024
        finally:
            daemon.terminate()
            daemon.wait(20)


def helped() -> float:
    began = time.perf_counter()
    subprocess.run([COMMAND, "status", "--help"], check=True, capture_output=True, timeout=60)
    return time.perf_counter() - began


def connector() -> tuple[float, float, int]:
    """Seconds of the import, MiB and modules that it adds."""
    options: dict[str, Any] = {"cwd": "/", "check": True, "capture_output": True, "text": True, "timeout": 120}
    run = subprocess.run([sys.executable, "-c", CONNECTOR], **options)  # cwd: not the source folder, which comes first
    seconds, kib, modules = run.stdout.split()[-3:]
    return float(seconds), int(kib) / 1024, int(modules)


def show(what: str, values: list[float], unit: str) -> None:
    print(f"{what:42} {statistics.median(values):8.3f} {unit:4} ({min(values):.3f} to {max(values):.3f})", flush=True)


def main() -> None:
    helped()  # bytecode is compiled
    starts = [started() for _ in range(RUNS)]
    show("daemon: until it is ready", [seconds for seconds, _ in starts], "s")
    show("daemon: memory when ready", [mib for _, mib in starts], "MiB")
    show("kvserver status --help", [helped() for _ in range(RUNS)], "s")
    if importlib.util.find_spec("vllm") is None:
        print("connector: left out, this Python has no vLLM")
        return
    connector()
    imports = [connector() for _ in range(RUNS)]
    show("connector: its import, vLLM being there", [seconds for seconds, _, _ in imports], "s")
    show("connector: memory that it adds", [mib for _, mib, _ in imports], "MiB")
    print(f"{'connector: modules of kvserver':42} {imports[0][2]:8}")


if __name__ == "__main__":
    main()
