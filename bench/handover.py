"""Prefill and decode by two real vLLM servers on CPU, each on a processor of its own: first tokens, and what running decodes feel.

    KVSERVER_BIN=.venv/bin/kvserver .venv-vllm/bin/python bench/handover.py [--prompts 15] [--tokens 1500] [--store valkey|mooncake]

*First token*: each fresh prompt goes to the prefill server with max_tokens=1, then to the decode server with what the first one answered.
In the same turn the decode server computes another fresh prompt (*cold*), and loads the first one from L1 once it has forgotten it
(*warm*). With --store each server has a daemon of its own, as on two machines, and the prompt goes through the store. Then its first token
is taken apart: the lookup, the wait until the store has something, the one until all is read, the load, and the engine's own time.

*Between tokens*: four streams decode. Meanwhile nothing else runs (*alone*), other prompts are prefilled by the same server
(*together*), or by the other one, which hands them over (*apart*). At least 1,000 gaps each.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from common import table
from engine import MODELS, WARM_UPS
from serving import Server, completion
from support.daemon import Daemon, wait_until
from support.store_process import store_process
from tiny_models import llama, prompt

STREAMS, STREAM_TOKENS = 4, 300


class Bench:
    def __init__(self, stack: ExitStack, model: Path, folder: Path, tokens: int, store: str) -> None:
        self._tokens, self._seeds = tokens, itertools.count()
        flags: dict[str, Any] = {"l1_size": "1GiB", "tails": "on"}
        if store:
            flags["l2"] = stack.enter_context(store_process(store, "handover")).url
        self._daemons = [stack.enter_context(_running(Daemon(**flags))) for _ in range(2 if store else 1)]
        extra = {"kvserver.weights_digest": "whole"}
        roles = {"prefill": "kv_producer", "decode": "kv_consumer"}
        started = [
            Server(model, daemon.endpoint, folder / f"{name}.log", name, extra, role, enable_prompt_tokens_details=True)
            for (name, role), daemon in zip(roles.items(), [self._daemons[0], self._daemons[-1]], strict=True)
        ]
        for processor, server in enumerate(started):
            stack.callback(server.close)
            os.sched_setaffinity(server.process.pid, {processor})  # of a thread that begins later, too
        self._prefill, self._decode = (server.wait_ready() for server in started)
        rows = lambda: [row for daemon in self._daemons for row in daemon.status()["instances"]]  # noqa: E731
        wait_until(lambda: sum(bool(row["namespace"]) for row in rows()) == 2, 60, "both are registered")

    def first_tokens(self) -> dict[str, float]:
        """Milliseconds of a fresh prompt."""
        tokens, other = (prompt(next(self._seeds), self._tokens) for _ in range(2))
        found: dict[str, float] = {}
        began = time.perf_counter()
        params = self._prefilled(tokens)
        answered = time.perf_counter()
        found["prefill"] = 1e3 * (answered - began)
        found["decode"] = self._first_token(tokens, params)
        self._decode.forget()
        found["warm"] = self._first_token(tokens)
        self._decode.forget()
        found["cold"] = self._first_token(other)
        self._decode.forget()
        return found

    def parts(self) -> dict[str, float]:
        """Milliseconds of the decode server's first token, and those of its daemon in it."""
        decodes, tokens = self._daemons[-1], prompt(next(self._seeds), self._tokens)
        params = self._prefilled(tokens)
        before = _times(decodes)
        found = {"first token": self._first_token(tokens, params)}
        wait_until(lambda: _times(decodes)["loads"] > before["loads"], 10, "the load is counted")
        ours = {name: 1e3 * (seconds - before[name]) for name, seconds in _times(decodes).items() if name != "loads"}
        ours["until found"] -= ours["until read"]
        self._decode.forget()
        return {**found, **ours, "the engine's own": found["first token"] - sum(ours.values())}

    def gaps(self, beside: str) -> list[float]:
        """Milliseconds between two tokens of a stream, while prompts are prefilled."""
        found: list[float] = []
        streams = [threading.Thread(target=self._stream, args=(found,)) for _ in range(STREAMS)]
        for stream in streams:
            stream.start()
        while any(stream.is_alive() for stream in streams):
            if beside == "alone":
                time.sleep(0.05)
                continue
            tokens = prompt(next(self._seeds), self._tokens)
            params = self._prefilled(tokens) if beside == "apart" else None
            self._decode.post("/v1/completions", completion(tokens, 2, kv_transfer_params=params))
        self._decode.forget()
        return found

    def _prefilled(self, tokens: list[int]) -> dict[str, Any]:
        params: dict[str, Any] = self._prefill.post("/v1/completions", completion(tokens, 1))["kv_transfer_params"]
        assert params["kvserver.prefilled_tokens"] > self._tokens - 64
        return params

    def _first_token(self, tokens: list[int], params: dict[str, Any] | None = None) -> float:
        began = time.perf_counter()
        return 1e3 * (next(self._times(completion(tokens, 1, kv_transfer_params=params))) - began)

    def _stream(self, found: list[float]) -> None:
        times = list(self._times(completion(prompt(next(self._seeds), 32), STREAM_TOKENS)))
        found += [1e3 * (later - before) for before, later in itertools.pairwise(times)]

    def _times(self, body: dict[str, Any]) -> Any:
        """When each token came."""
        request = urllib.request.Request(
            self._decode.url + "/v1/completions",
            json.dumps(body | {"stream": True}).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    yield time.perf_counter()


def _sum(daemon: Daemon, name: str, **labels: str) -> float:
    """The sum over all series with these labels."""
    found = daemon.samples(name)
    return sum(each.value for each in found if labels.items() <= each.labels.items())


def _times(daemon: Daemon) -> dict[str, float]:
    """Seconds that requests have waited for the daemon, and the number of loads."""
    return {
        "lookup": _sum(daemon, "kvserver_rpc_seconds_sum", type="Lookup"),
        "until found": _sum(daemon, "kvserver_rpc_seconds_sum", type="AwaitFill"),
        "until read": _sum(daemon, "kvserver_fill_seconds_total"),
        "load": _sum(daemon, "kvserver_load_duration_seconds_sum"),
        "loads": _sum(daemon, "kvserver_load_duration_seconds_count"),
    }


class _running:
    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon

    def __enter__(self) -> Daemon:
        return self._daemon.start()

    def __exit__(self, *_: object) -> None:
        self._daemon.close()


def quantile(values: list[float], which: float) -> float:
    return sorted(values)[int(which * len(values))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--store", choices=["valkey", "mooncake"], default="")
    parser.add_argument("--model", choices=MODELS, default="12 x 1024")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what was started is stopped
    with tempfile.TemporaryDirectory(prefix="kvserver-bench-") as folder, ExitStack() as stack:
        model = llama(Path(folder, "model"), **MODELS[options.model])
        bench = Bench(stack, model, Path(folder), options.tokens, options.store)
        rounds = [bench.first_tokens() for _ in range(WARM_UPS + options.prompts)][WARM_UPS:]
        ms = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
        whole = statistics.median(
            (each["prefill"] + each["decode"]) / (each["prefill"] + each["warm"]) for each in rounds
        )
        print(
            f"ms of {options.tokens} tokens, model {options.model}, medians of {options.prompts}; store: {options.store or 'L1'}"
        )
        print(
            table(
                [*ms, "(prefill + decode) / (prefill + warm)"],
                [[*(round(value, 1) for value in ms.values()), round(whole, 3)]],
            )
        )
        if options.store:
            parts = [bench.parts() for _ in range(WARM_UPS + options.prompts)][WARM_UPS:]
            shares = [1 - each["the engine's own"] / each["first token"] for each in parts]
            medians = [statistics.median(each[name] for each in parts) for name in parts[0]]
            print(
                table(
                    [*parts[0], "share of ours"],
                    [[*(round(value, 1) for value in medians), round(statistics.median(shares), 2)]],
                )
            )
        rows = []
        for beside in ("alone", "together", "apart") if not options.store else ():
            gaps = bench.gaps(beside)
            assert len(gaps) >= 1000, len(gaps)
            rows.append([beside, len(gaps), *(round(quantile(gaps, which), 1) for which in (0.5, 0.9, 0.99))])
        if rows:
            print(table(["prefills", "gaps", "p50 ms", "p90", "p99"], rows))


if __name__ == "__main__":
    main()
