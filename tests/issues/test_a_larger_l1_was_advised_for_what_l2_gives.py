"""The advice on L1's size counted L1 alone as "L1 and L2": with 58.9% found in L1 and 15.0% read from L2 the page, `status`, `top` and
Grafana showed what an L1 four times as large would have found, 74.0%, as if nothing of that were there already."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from support.daemon import Daemon, wait_until
from support.explained import CHUNK
from support.worker import Worker, make_keys

from kvserver.cli import status as cli_status
from kvserver.protocol import AwaitFill, LookupReply
from kvserver.protocol.status import DaemonStatus, WhatIfSize, WhatIfStatus
from kvserver.telemetry import with_l2

SIZES = ("0.25", "0.5", "1", "2", "4", "8", "unlimited")


def curve(*would_hit: int) -> WhatIfStatus:
    """Of 1,000 tokens looked up."""
    sizes = [
        WhatIfSize(size=size, size_bytes=None if size == "unlimited" else 1, would_hit_tokens=tokens)
        for size, tokens in zip(SIZES, would_hit, strict=True)
    ]
    return WhatIfStatus(looked_up_tokens=1000, sizes=sizes)


ISSUE = curve(300, 450, 589, 650, 738, 739, 740)


@pytest.mark.parametrize(
    ("shown", "l2_tokens", "seconds", "advice"),
    [
        (curve(0, 0, 0, 0, 0, 0, 0), 0, 0, "L1 as it is would have found 0.0% of the tokens looked up; no larger L1 would have found as much as 1% more."),
        (ISSUE, 0, 0, "An L1 4 times as large would have found 73.8% of the tokens looked up; L1 as it is 58.9%."),
        (
            ISSUE, 150, 412,
            "L1 as it is, with L2, would have found 73.9% of the tokens looked up; no larger L1 would have found as much as 1% more. For 15.0% requests "
            "waited 412.0 s for reads from L2; an L1 4 times as large would have spared them about 409.3 s.",
        ),
        (
            ISSUE, 50, 10,
            "An L1 4 times as large would have found 73.8% of the tokens looked up; L1 as it is, with L2, 63.9%. For 5.0% requests "
            "waited 10.0 s for reads from L2; an L1 2 times as large would have spared them about 10.0 s.",
        ),
        (
            curve(589, 589, 589, 589, 589, 589, 589), 150, 7,
            "L1 as it is, with L2, would have found 73.9% of the tokens looked up; no larger L1 would have found as much as 1% more. For 15.0% requests "
            "waited 7.0 s for reads from L2.",
        ),
        (
            curve(0, 0, 0, 0, 0, 0, 900), 0, 0,
            "An L1 without limit would have found 90.0% of the tokens looked up; L1 as it is 0.0%. What no L1 is large enough for, storage "
            "behind it (--l2) may have.",
        ),
        (curve(0, 0, 995, 995, 999, 999, 1000), 900, 1, "L1 as it is, with L2, would have found 100.0%"),
        (WhatIfStatus(), 0, 0, ""),
    ],
)  # fmt: skip
def test_the_advice_weighs_what_l2_gives_and_what_its_reads_cost(
    shown: WhatIfStatus, l2_tokens: int, seconds: float, advice: str
) -> None:
    found = with_l2(shown, l2_tokens, seconds).advice
    assert found.startswith(advice) if l2_tokens == 900 else found == advice


def test_a_daemon_that_reads_from_l2_advises_no_larger_l1(
    make_daemon: Callable[..., Daemon], make_worker: Callable[..., Worker], tmp_path: Path
) -> None:
    daemon = make_daemon(l1_size="1MiB", l2=f"file://{tmp_path}?size=64MiB")
    worker = make_worker(daemon)
    prompts = [make_keys(4) for _ in range(16)]
    for number, keys in enumerate([*prompts, *prompts]):
        message = worker.lookup_message(keys, f"r{number}")
        reply = worker.ask(message, LookupReply)
        had = reply.hit_chunks
        if number >= len(prompts):
            had = worker.ask(AwaitFill(message, 5000), LookupReply).hit_chunks
        worker.store(keys, worker.blocks_for(len(keys)))
        worker.end_request(f"r{number}", prompt_tokens=4 * CHUNK, loaded_tokens=had * CHUNK)
        wait_until(lambda: not daemon.tier()["queue_objects"], what="L2 has all")
    wait_until(lambda: daemon.status()["what_if"]["looked_up_tokens"] == 32 * 4 * CHUNK)
    status = wait_until(lambda: s if (s := daemon.status())["totals"]["prompt_tokens"]["l2"] else None)
    curve = status["what_if"]
    assert status["l1"]["evictions"] > 0, "L1 is full"
    assert 0 < curve["l2_tokens"] == status["totals"]["prompt_tokens"]["l2"]
    waited = daemon.metric("kvserver_fill_seconds_total")
    assert waited == pytest.approx(curve["fill_seconds"], abs=1e-5)
    assert 0 < curve["fill_seconds"] < 60
    assert curve["advice"].startswith(
        "L1 as it is, with L2, would have found 50.0% of the tokens looked up; no larger L1"
    )
    assert f"waited {curve['fill_seconds']:,.1f} s for reads from L2" in curve["advice"]
    text = " ".join(cli_status.table(msgspec.convert(status, DaemonStatus)).split())
    assert f"would be hits in L1 alone (estimated, by slru) {curve['advice']}" in text
