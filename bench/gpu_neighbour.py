"""Another process that computes on the GPU while the benchmark copies. Usage: gpu_neighbour.py [--simulated]

Each line of its input is `[work, seconds]` in JSON; it answers with the milliseconds of each turn of that work.
  decode    a CUDA graph of 16 layers of a step of 16 sequences: five thin products (memory-bound) and an attention over
            2048 tokens each, 7 GB of weights in all: ~3 ms on an H100, the time of a token
  prefill   four products of 8192 x 8192 x 8192 in bf16: compute-bound, every SM is taken for ~1.5 ms at a time
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

    return dict.fromkeys(("decode", "prefill", "launches"), copy)


def works() -> dict[str, Callable[[], None]]:
    """Each returns when the GPU has done it. Inputs are noise: products of zeros run faster."""
    import torch

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda:0", dtype=torch.bfloat16) / 90

    hidden, inner, kv_heads, queries, tokens, batch = 4096, 14336, 8, 4, 2048, 16
    shapes = [
        (hidden, hidden + 2 * kv_heads * 128),
        (hidden, hidden),
        (hidden, inner),
        (hidden, inner),
        (inner, hidden),
    ]
    weights = [[made(*shape) for shape in shapes] for _ in range(16)]
    caches = [made(2, batch, kv_heads, tokens, 128) for _ in range(2)]  # in turn: larger than L2
    rows = made(batch, hidden)
    left, right, product = made(8192, 8192), made(8192, 8192), made(8192, 8192)
    small = torch.zeros(1024, device="cuda:0")

    def layers() -> torch.Tensor:
        x = rows
        for number, (qkv, out, gate, up, down) in enumerate(weights):
            query = (x @ qkv)[:, :hidden].reshape(batch, kv_heads, queries, 128)
            keys, values = caches[number % 2]
            attended = torch.nn.functional.scaled_dot_product_attention(query, keys, values)
            x = x + attended.reshape(batch, hidden) @ out
            x = x + (torch.nn.functional.silu(x @ gate) * (x @ up)) @ down
            x = x / 8  # else it overflows
        return x

    def products() -> None:
        for _ in range(4):
            torch.matmul(left, right, out=product)

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
        "prefill": synchronized(products),
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
