"""`--share`: on a real daemon with two models the busy one does not push the other below its share."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.commands import run
from support.daemon import Daemon
from support.registration import identity
from support.worker import Worker, make_keys

MakeWorker = Callable[..., Worker]


def connect(make_worker: MakeWorker, daemon: Daemon, model: str) -> Worker:
    return make_worker(daemon, instance_id=model, model_name=model, identity=identity(model=model))


def models(daemon: Daemon) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = daemon.status()["l1"]["models"]
    return found


def serve(worker: Worker, keys: list[bytes]) -> int:
    """As an engine does it: look up, load the hit, store the prompt, end. Returns the chunks that were found."""
    blocks = worker.blocks_for(len(keys))
    found = worker.lookup(keys)
    if found:
        worker.load(keys[:found], blocks[: found * worker.chunk_blocks])
    worker.store(keys, blocks)
    worker.end_request()
    return found


def be_busy(worker: Worker, prompts: int, chunks: int = 4) -> None:
    for number in range(prompts):
        serve(worker, make_keys(chunks, ("busy", worker.instance_id, number)))


@pytest.mark.parametrize("policy", ["lru", "slru"])
def test_a_busy_model_cannot_push_another_below_its_share(
    make_daemon: Callable[..., Daemon], make_worker: MakeWorker, policy: str
) -> None:
    daemon = make_daemon(l1_size="1MiB", share="quiet=0.5", eviction_policy=policy)
    quiet, busy = (connect(make_worker, daemon, name) for name in ("quiet", "busy"))
    share = models(daemon)["quiet"]["share_bytes"]
    assert share == daemon.status()["l1"]["size_bytes"] // 2
    prompt, older = make_keys(14, "quiet"), make_keys(14, "older")
    assert serve(quiet, older) == serve(quiet, prompt) == 0
    shown = models(daemon)["quiet"]
    object_bytes = shown["used_bytes"] // shown["chunks"]
    assert shown["used_bytes"] > share + object_bytes
    be_busy(busy, 40)
    shown = models(daemon)
    assert shown["busy"]["evictions"] > 100, "the busy model was not busy"
    assert share <= shown["quiet"]["used_bytes"] < share + object_bytes
    assert serve(quiet, prompt) == len(prompt), "the older prompt was evicted first"
    be_busy(quiet, 40)
    assert models(daemon)["quiet"]["used_bytes"] >= share
    assert daemon.metric("kvserver_l1_model_share_bytes", model_name="quiet") == share
    assert daemon.metric("kvserver_l1_model_share_bytes", model_name="busy") == 0
    for worker in (quiet, busy):
        worker.unregister()
    daemon.wait_for_clean_accounting()
    daemon.audit()


def test_without_a_share_the_busy_model_pushes_the_other_out(
    make_daemon: Callable[..., Daemon], make_worker: MakeWorker
) -> None:
    daemon = make_daemon(l1_size="1MiB")
    quiet, busy = (connect(make_worker, daemon, name) for name in ("quiet", "busy"))
    serve(quiet, make_keys(5, "quiet"))
    be_busy(busy, 40)
    assert models(daemon)["quiet"]["used_bytes"] == 0


def test_unused_share_serves_other_models_and_returns_to_its_model_at_once(
    make_daemon: Callable[..., Daemon], make_worker: MakeWorker
) -> None:
    daemon = make_daemon(l1_size="1MiB", share="quiet=0.5")
    assert models(daemon)["quiet"]["used_bytes"] == 0, "a model with a share is shown from the start"
    busy = connect(make_worker, daemon, "busy")
    be_busy(busy, 40)
    l1 = daemon.status()["l1"]
    assert l1["size_bytes"] - l1["used_bytes"] < busy.chunk_bytes + l1["page_bytes"], "a part of L1 stays unused"
    quiet = connect(make_worker, daemon, "quiet")
    prompt = make_keys(3, "quiet")
    serve(quiet, prompt)
    assert serve(quiet, prompt) == len(prompt)
    be_busy(busy, 40)
    assert serve(quiet, prompt) == len(prompt)
    shown = run("status", "--http-port", str(daemon.http_port)).stdout
    assert "share  quiet: " in shown
    assert "share  busy: " not in shown


@pytest.mark.parametrize(
    ("shares", "why"),
    [
        (["a=0.6", "b=0.5"], "the shares are 1.1 of L1 together"),
        (["a"], "'a' is no share; write MODEL=FRACTION"),
        (["a=1.5"], "the share of 'a' is 1.5; it is more than 0 and at most 1"),
        (["a=0.1", "a=0.2"], "'a' has two shares"),
        (["a=0.6", "tenant:a=0.5"], "the shares are 1.1 of L1 together"),
        (["tenant:=0.1"], "'tenant:' names no tenant: its name is 1 to 64 letters"),
        (["tenant:a b=0.1"], "'tenant:a b' names no tenant"),
    ],
    ids=["more than all", "no fraction", "out of range", "twice", "with a tenant's", "no name", "a space"],
)
def test_a_daemon_with_bad_shares_does_not_start_and_states_why(shares: list[str], why: str) -> None:
    flags = [word for share in shares for word in ("--share", share)]
    done = run("serve", *flags)
    assert done.returncode == 2
    assert why in done.stderr
    assert "--share" in done.stderr
    assert len(done.stderr.splitlines()) == 1
