"""Whatever happens to the daemon, the engine goes on and its tokens are right; and the other way round.

The engines of this folder survive every test: a daemon that was killed, stopped or replaced must not
leave one of them broken for the next.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engines import Engine, Engines, Prompt
from support.daemon import Daemon, wait_until

from kvserver.adapters.common.link import BREAKER_LIMIT

Start = Callable[..., Daemon]
Make = Callable[..., Prompt]

pytestmark = pytest.mark.usefixtures("well_afterwards")


def reference(engine: Engine, prompts: list[Prompt], max_tokens: int = 16) -> list[list[int]]:
    """Tokens computed with no daemon there, from an empty cache. REQUIRES: no daemon runs."""
    engine.forget()
    tokens = [o["tokens"] for o in engine.generate(prompts, max_tokens)]
    engine.forget()
    return tokens


def ownerless() -> set[str]:
    """Names in /dev/shm that no running process has mapped or open: engines of other tests run beside these.

    Not the message queues of vLLM's own processes (`psm_`): those of an engine that a test beside these kills stay.
    """
    used = ""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended
            used += (process / "maps").read_text()
            used += "\n".join(os.readlink(link) for link in (process / "fd").iterdir()) + "\n"
    return {name for name in os.listdir("/dev/shm") if not name.startswith("psm_")} - set(
        re.findall(r"/dev/shm/(\S+)", used)
    )


def copying(daemon: Daemon) -> bool:
    return bool(daemon.accounting()["tickets"] > 0)


def finish(engine: Engine, request_id: str, seconds: float = 60) -> dict[str, Any]:
    reply = engine.ask("step", seconds=seconds, until=request_id)
    assert request_id in reply["outputs"], f"{request_id} did not finish in {seconds} s: {engine.counters()}"
    return reply


def tokens_of(reply: dict[str, Any], request_id: str) -> list[int]:
    found: list[int] = reply["outputs"][request_id]["tokens"]
    return found


def test_a_daemon_killed_between_requests_is_replaced_without_a_restart_of_vllm(
    first: Engine, second: Engine, engines: Engines, start_daemon: Start, prompt: Make
) -> None:
    texts = [prompt(210 + n, 700) for n in range(2)]
    alone = reference(first, texts)
    daemon = start_daemon()
    first.generate(texts)
    first.wait_for_stores()
    daemon.kill()
    first.forget()
    assert [o["tokens"] for o in first.generate(texts)] == alone
    first.forget()
    daemon.start()
    engines.wait_registered(daemon)
    assert [o["tokens"] for o in first.generate(texts)] == alone  # stores again
    first.wait_for_stores()
    warm = second.generate(texts)
    assert [o["tokens"] for o in warm] == alone
    assert all(o["cached_tokens"] == 512 for o in warm)


@pytest.mark.parametrize("killed", [False, True])
def test_what_a_daemon_wrote_to_l2_comes_back_after_its_end(
    first: Engine,
    second: Engine,
    engines: Engines,
    start_daemon: Start,
    prompt: Make,
    tmp_path: Path,
    killed: bool,
) -> None:
    texts = [prompt(230 + n + 5 * killed, 700) for n in range(3)]
    alone = reference(first, texts)
    daemon = start_daemon(l2=f"file://{tmp_path}/l2?size=256MiB")
    engines.wait_registered(daemon)
    first.generate(texts)
    first.wait_for_stores()
    wait_until(lambda: (tier := daemon.tier())["objects"] >= 3 * 2 and not tier["queue_objects"])
    (daemon.kill if killed else daemon.terminate)()
    daemon.start()
    engines.wait_registered(daemon)
    daemon.wait_for_tiers()
    assert daemon.status()["l1"]["chunks"] == 0
    warm = second.generate(texts)
    assert [o["tokens"] for o in warm] == alone
    assert all(o["cached_tokens"] >= 512 for o in warm)
    assert daemon.metric("kvserver_filled_tokens_total") == 3 * 512
    assert daemon.metric("kvserver_prompt_tokens_total", source="l2") == 3 * 512


@pytest.mark.parametrize("restarted", [False, True])
def test_tokens_stay_right_when_the_daemon_is_killed_during_a_load(
    first: Engine, second: Engine, start_daemon: Start, prompt: Make, restarted: bool
) -> None:
    text = prompt(220 + restarted, 900)
    alone = reference(first, [text])[0]
    daemon = start_daemon(pauses=True)
    first.generate([text])
    first.wait_for_stores()
    name = f"load{restarted:d}"
    with daemon.paused_copies():
        second.ask("add", request_id=name, prompt=text, max_tokens=16)
        second.send("step", seconds=60, until=name)
        daemon.wait_for_a_copy()
        daemon.kill()
    if restarted:
        daemon.start()
    reply = second.receive()
    assert tokens_of(reply, name) == alone
    assert second.counters()["worker"]["load_failures"] > 0


def test_tokens_stay_right_when_the_daemon_is_killed_during_a_store(
    first: Engine, second: Engine, start_daemon: Start, prompt: Make
) -> None:
    text = prompt(230, 900)
    alone = reference(first, [text])[0]
    daemon = start_daemon(pauses=True)
    with daemon.paused_copies():
        first.ask("add", request_id="store", prompt=text, max_tokens=16)
        first.send("step", seconds=60, until="store")
        daemon.wait_for_a_copy()
        daemon.kill()
    assert tokens_of(first.receive(), "store") == alone
    first.wait_for_stores()


def test_a_daemon_stopped_mid_load_is_outlived_and_its_blocks_stay_out_of_use(
    first: Engine, second: Engine, start_daemon: Start, prompt: Make
) -> None:
    """SIGSTOP in the middle of a load: the request is computed elsewhere; SIGCONT then writes to blocks of no request."""
    text, others = prompt(240, 900), [prompt(241 + n, 600) for n in range(6)]
    alone = reference(second, [text, *others])
    daemon = start_daemon(pauses=True)
    first.generate([text])
    first.wait_for_stores()
    with daemon.paused_copies():
        second.ask("add", request_id="stopped", prompt=text, max_tokens=16)
        second.send("step", seconds=60, until="stopped")
        daemon.wait_for_a_copy()
        daemon.freeze()
    began = time.monotonic()
    assert tokens_of(second.receive(), "stopped") == alone[0]
    print(f"a load that was stopped: its request was done after {time.monotonic() - began:.1f} s")
    counters = second.counters()
    assert counters["scheduler"]["quarantined_blocks"] == 24
    assert counters["blocks_in_use"] >= 24, "the server may still write these"
    # The engine goes on and uses every block that is free.
    assert [o["tokens"] for o in second.generate(others)] == alone[1:]
    daemon.thaw()
    # More work while the old load ends; then everything is free again and right.
    assert [o["tokens"] for o in second.generate(others)] == alone[1:]
    wait_until(lambda: second.owns_no_block_after(others[0]), 30, "its blocks are free")
    second.forget()
    assert second.generate([text])[0]["tokens"] == alone[0]


def test_a_daemon_stopped_mid_store_publishes_nothing_of_blocks_that_were_reused(
    first: Engine, second: Engine, start_daemon: Start, prompt: Make
) -> None:
    """SIGSTOP in the middle of a store while the engine reuses its blocks; then SIGCONT."""
    text, others = prompt(250, 900), [prompt(251 + n, 900) for n in range(12)]
    alone = reference(second, [text, *others])
    daemon = start_daemon(pauses=True)
    before = second.counters()["worker"].get("cancelled_stores", 0)
    with daemon.paused_copies():
        second.ask("add", request_id="store", prompt=text, max_tokens=16)
        second.send("step", seconds=60, until="store")
        daemon.wait_for_a_copy()
        daemon.freeze()
    assert tokens_of(second.receive(), "store") == alone[0]
    assert [o["tokens"] for o in second.generate(others)] == alone[1:], "they need 336 blocks, and there are 200"
    assert second.counters()["worker"]["cancelled_stores"] > before
    daemon.thaw()
    daemon.wait_for_accounting(tickets=0)
    # Whatever is READY now must be right: another engine uses it.
    warm = first.generate([text, *others])
    assert [o["tokens"] for o in warm] == alone


def test_a_hung_daemon_costs_little_and_then_nothing(
    first: Engine, second: Engine, start_daemon: Start, prompt: Make
) -> None:
    """Until the breaker opens requests wait for their lookups; then none does. Recovery needs no restart."""
    daemon = start_daemon()
    before = first.counters()["scheduler"].get("lookups", 0)
    daemon.freeze()
    for n in range(BREAKER_LIMIT):
        first.ask("add", request_id=f"hung{n}", prompt=prompt(260 + n, 300), max_tokens=4)
        finish(first, f"hung{n}")
    sent = first.counters()["scheduler"]["lookups"]
    assert before < sent <= before + BREAKER_LIMIT
    first.generate([prompt(290 + n, 300) for n in range(24)], 4)
    assert first.counters()["scheduler"]["lookups"] == sent, "with an open breaker nothing is sent"
    daemon.thaw()
    wait_until(lambda: first.generate([prompt(300, 300)], 1) and first.counters()["scheduler"]["lookups"] > sent, 30)


def test_an_operator_switches_serving_off_and_on_under_an_engine(
    first: Engine, second: Engine, engines: Engines, start_daemon: Start, prompt: Make
) -> None:
    texts = [prompt(340 + n, 700) for n in range(2)]
    alone = reference(first, texts)
    daemon = start_daemon()
    engines.wait_registered(daemon)
    first.generate(texts)
    first.wait_for_stores()
    for mode, cached in (("off", 0), ("stores-off", 512), ("on", 512)):
        assert daemon.http(f"/config/serving?value={mode}", "POST")[0] == 200
        second.forget()
        found = second.generate(texts)
        assert [o["tokens"] for o in found] == alone, mode
        assert [o["cached_tokens"] for o in found] == [cached] * 2, mode
        second.wait_for_stores()
    assert daemon.status()["totals"]["errors"] == 0
    assert daemon.status()["totals"]["failed_stores"] == 0


def test_tokens_stay_right_with_a_slow_a_full_and_a_refusing_daemon(
    first: Engine, second: Engine, start_daemon: Start, prompt: Make
) -> None:
    texts = [prompt(310 + n, 900) for n in range(4)]
    alone = reference(first, texts)
    slow = start_daemon(copy_delay_us=3000, copy_threads=1)
    assert [o["tokens"] for o in first.generate(texts)] == alone
    first.wait_for_stores()
    assert [o["tokens"] for o in second.generate(texts)] == alone
    slow.close()
    first.forget()
    second.forget()
    full = start_daemon(l1_size="5MiB")  # the twelve chunks of these prompts are 12 MiB
    for _ in range(2):
        assert [first.generate([t])[0]["tokens"] for t in texts] == alone
        first.wait_for_stores()
        assert [o["tokens"] for o in second.generate(texts)] == alone
        second.forget()
        first.forget()
    assert full.status()["l1"]["evictions"] > 0
    full.close()
    refusing = start_daemon(wait=False, l1_size="512KiB")  # no chunk fits: registration is refused
    wait_until(lambda: "raise --l1-size" in refusing.log, 30, "a refusal that names the flag")
    assert [o["tokens"] for o in first.generate(texts)] == alone
    assert refusing.status()["instances"] == []


def test_an_engine_killed_mid_copy_leaves_nothing_behind(
    first: Engine, engines: Engines, start_daemon: Start, prompt: Make
) -> None:
    text = prompt(330, 900)
    alone = reference(first, [text])[0]
    shm = ownerless()
    victim = engines.start("victim", dtype="float32")
    victim.wait_ready()
    daemon = start_daemon(pauses=True)
    standing = wait_until(
        lambda: daemon.accounting()["mappings"] // 2 == len(engines.live()) + 1 and daemon.accounting(), 30
    )
    with daemon.paused_copies():
        victim.ask("add", request_id="victim", prompt=text, max_tokens=16)
        victim.send("step", seconds=60, until="victim")
        daemon.wait_for_a_copy()
        victim.kill()
        wait_until(lambda: daemon.accounting()["attachments"] < standing["attachments"], what="the daemon saw it die")
    daemon.wait_for_accounting(tickets=0, pins=0, leases=0, mappings=standing["mappings"] - 2)
    assert daemon.status()["l1"]["chunks"] == 0
    assert daemon.accounting()["used_pages"] == 0
    wait_until(lambda: ownerless() <= shm, what="nothing new in /dev/shm is left")
    assert first.generate([text])[0]["tokens"] == alone


def test_a_request_aborted_while_it_loads_frees_its_blocks(
    first: Engine, second: Engine, start_daemon: Start, prompt: Make
) -> None:
    text = prompt(340, 900)
    alone = reference(second, [text])[0]
    daemon = start_daemon(pauses=True)
    first.generate([text])
    first.wait_for_stores()
    with daemon.paused_copies():
        second.ask("add", request_id="gone", prompt=text, max_tokens=16)
        wait_until(lambda: second.ask("step", seconds=0.01) and copying(daemon), 20, "the load to run")
        second.ask("abort", request_id="gone")
    assert not second.ask("step", seconds=20)["unfinished"]
    daemon.wait_for_accounting(tickets=0)
    second.ask("add", request_id="again", prompt=text, max_tokens=16)
    assert tokens_of(finish(second, "again"), "again") == alone


def test_two_engines_with_one_engine_id_do_not_mix(
    engines: Engines, first: Engine, start_daemon: Start, prompt: Make
) -> None:
    """The second one runs without cache, and computes right."""
    daemon = start_daemon()
    name = next(i["instance_id"] for i in daemon.status()["instances"])
    twin = engines.start("twin", dtype="float32", transfer={"engine_id": name})
    try:
        text = prompt(350, 700)
        expected = first.generate([text])[0]["tokens"]
        first.wait_for_stores()
        found = twin.generate([text])[0]
        assert (found["tokens"], found["cached_tokens"]) == (expected, 0)
        assert "belongs to another live engine" in twin.log.read_text()
    finally:
        twin.kill()


def test_nothing_stays_in_shared_memory_after_engines_ended(
    first: Engine, second: Engine, start_daemon: Start, prompt: Make
) -> None:
    """Comes last, so that it counts what all the tests of this file left."""
    daemon = start_daemon()
    shm = ownerless()
    for engine in (first, second):
        engine.generate([prompt(360, 600)])
        engine.close()
        assert "a fault in" not in engine.log.read_text()
    daemon.wait_for_clean_accounting()
    wait_until(lambda: ownerless() <= shm, what="nothing new in /dev/shm is left")
