"""`make demo`: two vLLM processes share a cache; the time to the first token, cold against warm.

The first engine computes each prompt and its KV goes to the daemon. The second engine, another process
that never saw the prompt, gets it back. Models are made here, with random weights; everything that is
started is stopped again. Runs in vLLM's environment, with tests/ on the path for the engines.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests/vllm")]
os.environ.setdefault("KVSERVER_BIN", str(ROOT / ".venv/bin/kvserver"))  # before the import that reads it
# A CPU has the kernels of model runner V2 in Triton's interpreter only, whose time is not to be measured.
os.environ.setdefault("KVSERVER_TEST_RUNNER", "v1")

import tiny_models  # noqa: E402
from engines import Engine, Engines  # noqa: E402
from support.daemon import Daemon, wait_until  # noqa: E402

MiB = 1 << 20


def main() -> int:
    parser = argparse.ArgumentParser(description="Cold against warm time to the first token, two vLLM processes.")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=1500, help="length of a prompt")
    parser.add_argument("--prompts", type=int, default=5)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what was started is stopped
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvserver-demo-") as folder:
        rows = run(options, Path(folder))
    print(f"\nall in {time.monotonic() - began:.0f} s; every process has ended")
    return 0 if all(row["equal"] for row in rows) else 1


def run(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    show(f"a Llama of {options.layers} layers x {options.hidden} with random weights ...")
    model = tiny_models.llama(folder / "model", layers=options.layers, hidden=options.hidden)
    daemon = Daemon(l1_size="1GiB", chunk_tokens=256, copy_threads=1)
    engines = Engines(model, folder, daemon.endpoint)
    try:
        daemon.start()
        show("two vLLM processes on CPU, one thread each ...")
        first, second = (engines.get(name, dtype="float32") for name in ("first", "second"))
        engines.wait_registered(daemon)
        for engine, seed in ((first, 1001), (second, 1002)):  # what a process does only once is not to be measured
            engine.ask("generate", prompts=[tiny_models.prompt(seed, options.tokens)], max_tokens=2)
        first.wait_for_stores()
        second.wait_for_stores()
        show(f"{options.prompts} prompts of {options.tokens} tokens, cold in the first, warm in the second ...\n")
        rows = [
            measure(daemon, first, second, tiny_models.prompt(seed, options.tokens)) for seed in range(options.prompts)
        ]
        print(table(options, rows))
        return rows
    finally:
        engines.close()
        if daemon.running():
            daemon.terminate()
        daemon.close()


def measure(daemon: Daemon, first: Engine, second: Engine, tokens: list[int]) -> dict[str, Any]:
    before = daemon.status()["totals"] | work(daemon)
    cold = first.ask("generate", prompts=[tokens], max_tokens=1)
    first.wait_for_stores()  # the KV goes to the daemon after the answer, while the engine is free
    wait_until(lambda: daemon.accounting()["tickets"] == 0)
    stored = daemon.status()["totals"] | work(daemon)
    warm = second.ask("generate", prompts=[tokens], max_tokens=1)
    after = daemon.status()["totals"] | work(daemon)
    longer = [engine.generate([tokens], 16)[0]["tokens"] for engine in (first, second)]
    second.wait_for_stores()
    same_first = cold["outputs"][0]["tokens"] == warm["outputs"][0]["tokens"]
    return {
        "cold": cold["seconds"],
        "warm": warm["seconds"],
        "cached": warm["outputs"][0]["cached_tokens"],
        "equal": same_first and longer[0] == longer[1],
        "stored_bytes": stored["stored_bytes"] - before["stored_bytes"],
        "store_seconds": (stored["store_nanos"] - before["store_nanos"]) / 1e9,
        "loaded_bytes": after["loaded_bytes"] - stored["loaded_bytes"],
        "load_seconds": (after["load_nanos"] - stored["load_nanos"]) / 1e9,
    }


def work(daemon: Daemon) -> dict[str, int]:
    """Time that the daemon's threads copied, all instances."""
    counts = [instance["requests"] for instance in daemon.status()["instances"]]
    return {name: sum(count[name] for count in counts) for name in ("store_nanos", "load_nanos")}


def table(options: argparse.Namespace, rows: list[dict[str, Any]]) -> str:
    lines = ["prompt   cold ms   warm ms   warm/cold   tokens from the cache   same tokens"]
    for number, row in enumerate(rows, 1):
        lines.append(line(str(number), row["cold"], row["warm"], row["cached"], row["equal"]))
    middle = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    lines.append(line("median", middle["cold"], middle["warm"], middle["cached"], all(row["equal"] for row in rows)))
    computed = options.tokens - middle["cached"]
    rest = middle["warm"] - middle["load_seconds"]
    lines += [
        "",
        "where the time went (medians):",
        f"  cold  {1000 * middle['cold']:7.1f} ms  computing {options.tokens} tokens; "
        f"{middle['stored_bytes'] / MiB:.0f} MiB then went to the daemon in {1000 * middle['store_seconds']:.1f} ms, "
        "beside the engine",
        f"  warm  {1000 * middle['load_seconds']:7.1f} ms  copying {middle['loaded_bytes'] / MiB:.0f} MiB from the daemon",
        f"        {1000 * rest:7.1f} ms  lookup, computing the last {computed:.0f} tokens, and vLLM's own work",
        "",
        "time to first token: one request at a time, max_tokens=1; both engines in float32, OMP_NUM_THREADS=1; "
        "the daemon with one copying thread",
        "same tokens: of that answer and of 16 more, greedy",
    ]
    return "\n".join(lines)


def line(name: str, cold: float, warm: float, cached: float, equal: bool) -> str:
    return f"{name:<6} {1000 * cold:9.1f} {1000 * warm:9.1f} {warm / cold:11.2f} {cached:23.0f}   {'yes' if equal else 'NO'}"


def show(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
