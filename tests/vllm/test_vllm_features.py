"""What requests and engines may have beside a prompt, on the worker that GPUs run: warm tokens equal cold ones and those of the engine's own cache.

tests/README.md names what does not run here, and why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from engines import TIMEOUTS, Engine, Engines, Prompt
from serving import Server, completion
from support.daemon import Daemon, wait_until
from test_vllm_outputs import same

pytestmark = pytest.mark.long
Start = Callable[..., Daemon]
Make = Callable[..., Prompt]
Requests = list[dict[str, Any]]

LENGTH, HIT = 700, 512
PRIORITIES = range(6)


def one(make: Make, **sampling: Any) -> Requests:
    return [{"prompt": make(1, LENGTH), "sampling": {"max_tokens": 24, **sampling}}]


def several(make: Make) -> Requests:
    """More than the engine's blocks, the most urgent last."""
    return [{"prompt": make(n, LENGTH), "sampling": {"max_tokens": 40}, "priority": 5 - n} for n in PRIORITIES]


def with_lora(make: Make, folder: Path) -> Requests:
    """Not beside one without: vLLM before 0.33 computes that with the LoRA, too, on CPUs (findings/)."""
    return [one(make)[0] | {"lora": str(tiny_models.lora(folder / "adapter"))}]


@dataclass(frozen=True)
class Kind:
    """An engine, and its requests."""

    options: Callable[[Path], dict[str, Any]]
    requests: Callable[[Make, Path], Requests] = lambda make, folder: one(make)
    hit: int = HIT
    named: str = ""  # kinds of one name share an engine
    environ: dict[str, str] = field(default_factory=dict)


def no_options(folder: Path) -> dict[str, Any]:
    return {}


def drafts(method: str, build: Callable[[Path], Path]) -> Callable[[Path], dict[str, Any]]:
    return lambda folder: {
        "speculative_config": {"method": method, "model": str(build(folder / method)), "num_speculative_tokens": 2}
    }


def small_llama(folder: Path) -> Path:
    return tiny_models.llama(folder, seed=3, layers=1)


KINDS = {
    "several outputs": Kind(no_options, lambda make, _: one(make, n=3, temperature=1.0, seed=7), named="plain"),
    "prompt logprobs": Kind(no_options, lambda make, _: one(make, prompt_logprobs=1), hit=0, named="plain"),
    "chunked prefill": Kind(
        lambda _: {"max_num_batched_tokens": 300},
        lambda make, _: [{"prompt": make(n, LENGTH), "sampling": {"max_tokens": 12}} for n in range(5)],
    ),
    "priorities": Kind(
        lambda _: {"scheduling_policy": "priority", "num_gpu_blocks_override": 70}, lambda make, _: several(make)
    ),
    "a LoRA": Kind(lambda _: {"enable_lora": True, "max_lora_rank": 8}, with_lora),
    "a draft model": Kind(drafts("draft_model", small_llama)),
    "EAGLE": Kind(drafts("eagle", tiny_models.eagle), hit=HIT - 32),  # vLLM leaves the last block out of its own hits, too
    "pipeline parallel": Kind(
        lambda _: {"pipeline_parallel_size": 2}, environ={"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    ),
}  # fmt: skip


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture
def engine(request: pytest.FixtureRequest, kind: Kind, engines: Engines, tmp_path: Path) -> Iterator[Engine]:
    """Ends with its test, unless it is shared."""
    name = kind.named or request.node.callspec.params["kind"].replace(" ", "-")
    engine = engines.get(name, dtype="float32", extra=TIMEOUTS, environ=kind.environ, **kind.options(tmp_path))
    yield engine
    if not kind.named:
        engine.close()


def test_warm_tokens_equal_cold_ones_and_those_of_the_own_cache(
    kind: Kind, engine: Engine, start_daemon: Start, prompt: Make, tmp_path: Path
) -> None:
    daemon = start_daemon()
    requests = kind.requests(prompt, tmp_path)
    engine.forget()

    def served() -> list[dict[str, Any]]:
        outputs: list[dict[str, Any]] = engine.ask("serve", requests=requests)["outputs"]
        return outputs

    cold = served()
    control = served()
    engine.wait_for_stores()
    engine.forget()
    warm = served()
    assert [answer["cached_tokens"] for answer in warm] == [kind.hit] * len(requests)
    for w, k, c in zip(warm, control, cold, strict=True):
        assert (w["tokens"], w["others"]) == (k["tokens"], k["others"]) == (c["tokens"], c["others"])
    if len(requests) == 1 and control[0]["cached_tokens"] == kind.hit:
        assert same(warm[0], control[0])
    assert len({tuple(answer["tokens"]) for answer in warm}) == len(requests)
    totals, counters = daemon.status()["totals"], engine.counters()
    assert (bool(totals["loaded_bytes"]), totals["failed_loads"], totals["errors"]) == (kind.hit > 0, 0, 0)
    assert counters["errors"] == {}
    assert engine.owns_no_block_after(prompt(99, 40))


@pytest.fixture
def plain(engines: Engines) -> Engine:
    return engines.get("plain", dtype="float32", extra=TIMEOUTS)


def empty(engine: Engine) -> None:
    """Let it end what it began, and forget."""
    assert not engine.ask("drain", seconds=20)["pending"]
    engine.forget()


def test_aborts_at_every_stage_leave_right_tokens_and_no_block(
    plain: Engine, start_daemon: Start, prompt: Make
) -> None:
    """While it is looked up, loads, computes, has computed. Cold in turn with warm."""
    daemon = start_daemon()
    empty(plain)
    reference = plain.generate([prompt(31, LENGTH)])[0]["tokens"]
    for steps in range(10):
        for seed in (31, 100 + steps):
            empty(plain)
            plain.ask("add", request_id=f"aborted{seed}.{steps}", prompt=prompt(seed, LENGTH), max_tokens=8)
            plain.ask("steps", count=steps)
            plain.ask("abort", request_id=f"aborted{seed}.{steps}")
    empty(plain)
    assert plain.owns_no_block_after(prompt(99, 40))
    plain.forget()
    warm = plain.generate([prompt(31, LENGTH)])[0]
    assert (warm["cached_tokens"], warm["tokens"]) == (HIT, reference)
    for steps in range(10):  # what aborted requests have stored
        plain.forget()
        text = prompt(100 + steps, LENGTH)
        found = plain.generate([text])[0]["tokens"]
        plain.forget()
        assert daemon.http("/cache/clear", "POST")[0] == 200
        assert plain.generate([text])[0]["tokens"] == found
        plain.wait_for_stores()
    assert plain.counters()["errors"] == {}


def test_a_streaming_session_finds_what_another_one_stored(plain: Engine, start_daemon: Start, prompt: Make) -> None:
    daemon = start_daemon()
    empty(plain)
    turns = [prompt(41, 400), prompt(42, 300), prompt(43, 300)]
    cold = plain.ask("session", request_id="cold", turns=turns, max_tokens=8)["turns"]
    plain.wait_for_stores()
    plain.forget()
    warm = plain.ask("session", request_id="warm", turns=turns, max_tokens=8)["turns"]
    assert [turn["tokens"] for turn in warm] == [turn["tokens"] for turn in cold]
    assert warm[0]["cached_tokens"] == 256
    plain.wait_for_stores()
    plain.forget()
    # vLLM drops the last token of a turn: the session's tokens as one prompt.
    whole = [*turns[0], *cold[0]["tokens"][:-1], *turns[1], *cold[1]["tokens"][:-1], *turns[2]]
    answer = plain.generate([whole], 8)[0]
    assert answer["tokens"] == cold[2]["tokens"]
    assert answer["cached_tokens"] >= 768
    totals = daemon.status()["totals"]
    assert (totals["failed_loads"], totals["errors"]) == (0, 0)
    assert plain.counters()["errors"] == {}


def test_ranks_of_data_parallel_read_what_the_others_stored(
    model: Path, engines: Engines, prompt: Make, tmp_path: Path
) -> None:
    """Two engines behind one address. Tokens per turn: cold in one, then in the other."""
    server = Server(
        model, engines.endpoint, tmp_path / "log", "parallel", data_parallel_size=2, data_parallel_size_local=2
    )
    daemon = Daemon(endpoint=engines.endpoint, l1_size="256MiB", chunk_tokens=256)
    try:
        daemon.start()
        server.wait_ready()
        names = {"parallel_dp0", "parallel_dp1"}
        wait_until(lambda: names <= {i["instance_id"] for i in daemon.status()["instances"] if i["namespace"]}, 60)
        text = prompt(71, LENGTH)
        answers = []
        for rank in ("0", "1"):
            answers.append(server.post("/v1/completions", completion(text, 8), X_Data_Parallel_Rank=rank))
            wait_until(lambda: daemon.status()["l1"]["chunks"] == 2, 20)
        tokens = [answer["choices"][0]["token_ids"] for answer in answers]
        assert tokens[0] == tokens[1]
        found = daemon.status()["instances"]
        hits = {i["instance_id"]: i["requests"]["hits"] for i in found if i["instance_id"] in names}
        assert hits == {"parallel_dp0": 0, "parallel_dp1": 1}
        assert daemon.status()["totals"]["failed_loads"] == daemon.status()["totals"]["errors"] == 0
    finally:
        server.close()
        daemon.close()
