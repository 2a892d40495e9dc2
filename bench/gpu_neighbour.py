"""Another process that computes on the GPU while the benchmark copies. Usage: gpu_neighbour.py [--simulated]

Each line of its input is `[work, seconds]` in JSON; it answers with the milliseconds of each turn of that work.
  decode    a CUDA graph of 64 products of a few rows with 128 MiB of weights each: memory-bound, ~2 ms on an H200
  matmul    one product of 8192 x 8192 x 8192 in bf16: compute-bound, ~1.5 ms
  launches  one tiny kernel and a synchronize: what a stall of the driver shows in
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable


def simulated_works() -> dict[str, Callable[[], None]]:
    source, target = bytearray(1 << 20), bytearray(1 << 20)

    def copy() -> None:
        target[:] = source

    return dict.fromkeys(("decode", "matmul", "launches"), copy)


def works() -> dict[str, Callable[[], None]]:
    """Each returns when the GPU has done it. Inputs are noise: products of zeros run faster."""
    import torch

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda:0", dtype=torch.bfloat16) / 90

    weights = [made(8192, 8192) for _ in range(64)]
    rows = made(16, 8192)
    left, right, product = made(8192, 8192), made(8192, 8192), made(8192, 8192)
    small = torch.zeros(1024, device="cuda:0")

    def layers() -> torch.Tensor:
        x = rows
        for weight in weights:
            x = torch.matmul(x, weight)
        return x

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        layers()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers()

    def synchronized(work: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            work()
            torch.cuda.synchronize()

        return run

    return {
        "decode": synchronized(graph.replay),
        "matmul": synchronized(lambda: torch.matmul(left, right, out=product)),
        "launches": synchronized(lambda: small.add_(1)),
    }


def main() -> None:
    found = simulated_works() if "--simulated" in sys.argv else works()
    for work in found.values():
        for _ in range(5):
            work()
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        name, seconds = json.loads(line)
        work, times = found[name], []
        until = time.perf_counter() + seconds
        while (began := time.perf_counter()) < until:
            work()
            times.append((time.perf_counter() - began) * 1000)
        print(json.dumps(times), flush=True)


if __name__ == "__main__":
    main()
