"""A real server's metrics: what the daemon shows of its engine stats, and what its own metrics state of the connector: also
whether its cache is on, and why not, as `kvserver doctor --engine` reads it there.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from engines import Prompt
from serving import Server, completion
from support.daemon import KVSERVER, Daemon, wait_until
from support.worker import Worker

CHUNK = 256
SAME = {  # in the daemon's engine stats, in vLLM's own metrics
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "kv_cache_usage": "vllm:kv_cache_usage_perc",
    "prompt_tokens": "vllm:prompt_tokens_total",
    "generation_tokens": "vllm:generation_tokens_total",
    "preemptions": "vllm:num_preemptions_total",
    "prefix_queries": "vllm:prefix_cache_queries_total",
    "prefix_hits": "vllm:prefix_cache_hits_total",
    "external_queries": "vllm:external_prefix_cache_queries_total",
    "external_hits": "vllm:external_prefix_cache_hits_total",
}


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """Not started yet."""
    daemon = Daemon(l1_size="256MiB", chunk_tokens=CHUNK)
    yield daemon
    daemon.close()


@pytest.fixture(scope="module")
def alone(model: Path, daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that started before its daemon."""
    log = tmp_path_factory.mktemp("server") / "server.log"
    server = Server(model, daemon.endpoint, log, "busy", {"kvserver.load_interval_ms": 50})
    try:
        yield server.wait_ready()
    finally:
        server.close()


@pytest.fixture(scope="module")
def server(alone: Server, daemon: Daemon) -> Server:
    daemon.start()
    wait_until(lambda: daemon.status()["instances"], 20, "the engine has registered")
    return alone


def cache_of(server: Server) -> tuple[float, str]:
    """Whether it is on, and the reason if not."""
    found = server.samples("vllm:kvserver_without_cache_info")
    reasons = [sample.labels["reason"] for sample in found if sample.value == 1]
    return server.metrics()["vllm:kvserver_connected"], ", ".join(reasons)


def doctor(server: Server) -> tuple[int, str]:
    """Exit code and output."""
    ended = subprocess.run([KVSERVER, "doctor", "--engine", server.url], capture_output=True, text=True, timeout=60)
    assert ended.stderr == ""
    return ended.returncode, ended.stdout


def assert_without_cache(server: Server, reason: str) -> None:
    """Within a scrape interval or so, and the doctor agrees."""
    wait_until(lambda: cache_of(server) == (0, reason), 20, reason)
    code, text = doctor(server)
    assert code == 1, text
    assert f"the cache is off ({reason})" in text


def assert_with_cache(server: Server) -> None:
    wait_until(lambda: cache_of(server) == (1, ""), 20, "connected")
    code, text = doctor(server)
    assert code == 0, text
    assert "the cache is on" in text


def test_an_engine_that_never_connected_reports_that_before_its_first_request(alone: Server) -> None:
    assert_without_cache(alone, "no_daemon")


def test_an_engine_that_started_without_a_daemon_computes_and_uses_one_once_it_is_there(
    alone: Server, daemon: Daemon, prompt: Callable[..., Prompt], request: pytest.FixtureRequest
) -> None:
    assert daemon.process is None
    words = prompt(1, 2 * CHUNK + 40)
    computed = alone.generate(words)
    server: Server = request.getfixturevalue("server")

    def stored() -> bool:
        server.forget()
        assert server.generate(words) == computed
        return bool(row_of(daemon)["requests"]["stored_chunks"] >= 2)

    wait_until(stored, 30, "both chunks are stored")
    server.forget()
    assert server.generate(words) == computed
    wait_until(lambda: server.metrics()["vllm:kvserver_load_bytes_total"] > 0, 20, "vLLM has recorded a load")
    assert row_of(daemon)["requests"]["loaded_bytes"] > 0


def row_of(daemon: Daemon) -> dict[str, Any]:
    rows: list[dict[str, Any]] = daemon.status()["instances"]
    assert [row["instance_id"] for row in rows] == ["busy"]
    return rows[0]


def crowded(load: dict[str, Any] | None) -> dict[str, Any] | None:
    return load if load and load["running"] and load["waiting"] and load["kv_cache_usage"] > 0.5 else None


def agreed(daemon: Daemon, server: Server) -> dict[str, Any]:
    """The engine stats, once they and vLLM's metrics agree on a server that has nothing to do."""

    def found() -> dict[str, Any] | None:
        load, own = row_of(daemon)["load"], server.metrics()
        same = load is not None and all(load[ours] == own[theirs] for ours, theirs in SAME.items())
        return load if same and not load["running"] else None

    return wait_until(found, 20, "both agree")


def test_the_daemon_shows_the_stats_that_vllm_has(
    daemon: Daemon, server: Server, prompt: Callable[..., Prompt]
) -> None:
    before = agreed(daemon, server)
    for number in range(4):
        server.generate(prompt(number, 100 + number), 10 + number)
    after = agreed(daemon, server)
    assert after["prompt_tokens"] - before["prompt_tokens"] == 100 + 101 + 102 + 103
    assert after["generation_tokens"] - before["generation_tokens"] == 10 + 11 + 12 + 13
    assert after["finished_requests"] - before["finished_requests"] == 4
    assert not after["stale"]


def test_requests_are_seen_while_they_run(daemon: Daemon, server: Server, prompt: Callable[..., Prompt]) -> None:
    """200 blocks of 32 tokens hold two requests of 1500 tokens and one more, not five."""
    with ThreadPoolExecutor(5) as pool:
        futures = [pool.submit(server.generate, prompt(20 + number, 1500), 120) for number in range(5)]
        busy = wait_until(lambda: crowded(row_of(daemon)["load"]), 60, "some wait, and much of the KV cache is in use")
        assert busy["running"] + busy["waiting"] <= 5
        assert busy["kv_cache_usage"] <= 1
        for future in futures:
            assert len(future.result()) == 120
    code, text = daemon.http("/metrics")
    assert code == 200
    assert 'kvserver_engine_running_requests{instance_id="busy",model_name="tiny"}' in text
    agreed(daemon, server)


def test_a_hit_is_in_vllms_own_metrics_under_its_tier(
    daemon: Daemon, server: Server, prompt: Callable[..., Prompt]
) -> None:
    words = prompt(50, 2 * CHUNK + 40)
    stored = row_of(daemon)["requests"]["stored_chunks"]
    cold = server.generate(words)
    wait_until(lambda: row_of(daemon)["requests"]["stored_chunks"] >= stored + 2, 20, "both chunks are stored")
    server.forget()
    before, host = server.metrics(), server.metrics(source="host")
    assert server.generate(words) == cold
    loads = "vllm:kvserver_load_seconds_count"
    wait_until(lambda: server.metrics().get(loads, 0) > before.get(loads, 0), 20, "vLLM has recorded the load")
    after, by_source = server.metrics(), server.metrics(source="host")

    def grew(name: str) -> float:
        return after[name] - before.get(name, 0)

    assert grew("vllm:external_prefix_cache_hits_total") == 2 * CHUNK
    name = "vllm:prompt_tokens_cached_by_source_total"
    assert by_source[name] - host.get(name, 0) == 2 * CHUNK
    assert grew("vllm:kvserver_lookups_total") == 1
    assert grew("vllm:kvserver_lookup_hits_total") == 1
    assert grew("vllm:kvserver_load_seconds_count") == 1
    assert after["vllm:kvserver_load_bytes_total"] == row_of(daemon)["requests"]["loaded_bytes"] > 0
    assert after["vllm:kvserver_load_failures_total"] == 0


def test_the_ids_that_a_client_knows_find_its_requests_and_where_the_tokens_came_from(
    daemon: Daemon, server: Server, prompt: Callable[..., Prompt]
) -> None:
    server.generate(prompt(59, 40))  # the scheduler half has met the daemon
    words = prompt(60, 2 * CHUNK + 40)
    stored = row_of(daemon)["requests"]["stored_chunks"]
    cold = server.post("/v1/completions", completion(words, 8))
    wait_until(lambda: row_of(daemon)["requests"]["stored_chunks"] >= stored + 2, 20, "both chunks are stored")
    server.forget()
    warm = server.post("/v1/completions", completion(words, 8), X_Request_Id="my-own-id")
    assert warm["choices"][0]["token_ids"] == cold["choices"][0]["token_ids"]

    def explained(client_id: str) -> dict[str, Any] | None:
        code, body = daemon.http(f"/explain?request_id={client_id}")
        requests = json.loads(body)["requests"] if code == 200 else [{"outcome": "running"}]
        assert len(requests) == 1
        found: dict[str, Any] = requests[0]
        return found if found["outcome"] != "running" else None

    missed = wait_until(lambda: explained(cold["id"]), 20, "the end of the cold one")
    assert (missed["outcome"], missed["missing"]["reason"], missed["missing"]["chunk"]) == ("miss", "never_stored", 0)
    assert missed["tokens"]["computed"] == 2 * CHUNK + 40
    for client_id in (warm["id"], "my-own-id"):
        hit = wait_until(lambda known=client_id: explained(known), 20, "the end of the warm one")
        assert hit["request_id"].startswith("cmpl-my-own-id-0-")
        assert hit["outcome"] == "hit"
        tokens = hit["tokens"]
        assert (tokens["l0"], tokens["l1"], tokens["computed"]) == (0, 2 * CHUNK, 40)
        assert [load["outcome"] for load in hit["loads"]] == ["done"]
        assert hit["waits"]["first_lookup_to_load_seconds"] > 0


def wishing(server: Server, words: Prompt, **wishes: Any) -> list[int]:
    """The answer to a request with these wishes in its body."""
    params = {f"kvserver.{name}": value for name, value in wishes.items()}
    answer = server.post("/v1/completions", completion(words, 8, kv_transfer_params=params))
    tokens: list[int] = answer["choices"][0]["token_ids"]
    return tokens


def test_wishes_of_a_request_sent_over_http_are_obeyed(
    daemon: Daemon, server: Server, prompt: Callable[..., Prompt]
) -> None:
    """`kvserver.no_store`, `kvserver.max_load_tokens` and `kvserver.tiers`, and one that means nothing."""
    words = prompt(65, 3 * CHUNK + 40)
    stored = row_of(daemon)["requests"]["stored_chunks"]
    cold = wishing(server, words, no_store=True)
    seen = prompt(66, 2 * CHUNK + 40)
    server.generate(seen)  # its chunks are the next that are stored
    wait_until(
        lambda: row_of(daemon)["requests"]["stored_chunks"] == stored + 2, 20, "those of the second request only"
    )
    server.forget()
    assert server.generate(words) == cold  # a miss: it stores them
    wait_until(lambda: row_of(daemon)["requests"]["stored_chunks"] == stored + 5, 20, "those of the first one")

    def hits(**wishes: Any) -> float:
        """What vLLM counts of a request with these wishes."""
        server.forget()
        before = agreed(daemon, server)["external_hits"]
        assert wishing(server, words, **wishes) == cold
        return float(agreed(daemon, server)["external_hits"] - before)

    assert hits(max_load_tokens=0) == 0
    assert hits(max_load_tokens=2 * CHUNK + 1) == 2 * CHUNK
    assert hits(tiers=[]) == 0
    assert hits(tiers=["l1"]) == 3 * CHUNK
    bad = server.metrics()["vllm:kvserver_bad_wishes_total"]
    assert hits(tiers="everything") == 3 * CHUNK
    wait_until(lambda: server.metrics()["vllm:kvserver_bad_wishes_total"] == bad + 1, 20, "it is counted")


def test_the_server_goes_on_while_the_daemon_is_stopped_and_its_stats_are_sent_afterwards(
    daemon: Daemon, server: Server, prompt: Callable[..., Prompt]
) -> None:
    before = agreed(daemon, server)
    daemon.freeze()
    try:
        for number in range(3):
            assert len(server.generate(prompt(70 + number, 40), 20)) == 20
    finally:
        daemon.thaw()
    after = agreed(daemon, server)
    assert after["generation_tokens"] - before["generation_tokens"] == 60
    assert not after["stale"]


# ---- whether its cache is on ---------------------------------------------------------------------


def test_a_daemon_that_hangs_is_seen_while_the_engine_is_idle(daemon: Daemon, server: Server) -> None:
    assert_with_cache(server)
    daemon.freeze()
    try:
        assert_without_cache(server, "no_answer")
        assert server.metrics()["vllm:kvserver_breaker_open"] == 0, "it has waited for nothing"
    finally:
        daemon.thaw()
    assert_with_cache(server)


def test_breaker_is_in_the_metrics_when_it_opens_and_when_it_closes(
    daemon: Daemon, server: Server, prompt: Callable[..., Prompt]
) -> None:
    assert_with_cache(server)
    daemon.freeze()
    try:
        for number in range(4):  # three lookups without an answer open it; the fourth request waits for nothing
            assert len(server.generate(prompt(80 + number, CHUNK + 40), 2)) == 2
        wait_until(lambda: server.metrics()["vllm:kvserver_breaker_open"] == 1, 20, "the breaker is open")
        assert_without_cache(server, "breaker_open")
    finally:
        daemon.thaw()
    assert_with_cache(server)
    server.generate(prompt(90, 40), 2)
    wait_until(lambda: server.metrics()["vllm:kvserver_breaker_open"] == 0, 20, "it is closed")


def test_an_idle_engine_whose_daemon_ended_and_that_the_next_one_refuses_reports_both(
    daemon: Daemon, server: Server
) -> None:
    """Another live engine has its id by then."""
    assert_with_cache(server)
    daemon.kill()
    assert_without_cache(server, "no_daemon")
    os.killpg(server.process.pid, signal.SIGSTOP)  # so that the other one is the first
    try:
        daemon.start()
        other = Worker(daemon.endpoint, instance_id=server.engine_id, incarnation="another")
    finally:
        os.killpg(server.process.pid, signal.SIGCONT)
    try:
        assert_without_cache(server, "refused_duplicate_instance")
    finally:
        other.close()
    assert_with_cache(server)
    faults = [sample.value for sample in server.samples("vllm:kvserver_faults_total")]
    assert len(faults) > 40
    assert sum(faults) == 0
