"""A restart with --l1-file beside engines on GPUs: L1 is pinned anew in the background, and copies are right before that. GPUs are simulated."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.daemon import GPUS, Daemon, pin_l1
from support.kept_l1 import hits, restart, store_prompt

Make = Callable[..., Daemon]


@pytest.fixture(scope="module")
def device() -> str:
    return "gpu"


def test_l1_is_pinned_anew_after_a_restart_and_its_chunks_are_right(path: Path, make_daemon: Make) -> None:
    daemon = make_daemon(l1_file=path, gpus=GPUS[0])
    pin_l1(daemon)
    prompts = [store_prompt(daemon, gpu=GPUS[0]) for _ in range(3)]
    restart(daemon)
    assert [hits(daemon, prompt, gpu=GPUS[0]) for prompt in prompts] == [3, 3, 3], "whether or not it is pinned by now"
    pin_l1(daemon)
    assert [hits(daemon, prompt, gpu=GPUS[0]) for prompt in prompts] == [3, 3, 3]
    daemon.audit()


def test_chunks_of_memory_that_is_not_pinned_are_right_after_a_restart(path: Path, make_daemon: Make) -> None:
    daemon = make_daemon(l1_file=path, gpus=GPUS[0])
    pin_l1(daemon)
    prompts = [store_prompt(daemon, gpu=GPUS[0]) for _ in range(3)]
    restart(daemon, pin="off")
    assert [hits(daemon, prompt, gpu=GPUS[0]) for prompt in prompts] == [3, 3, 3]
    assert daemon.status()["l1"]["pinned_bytes"] == 0
    new = store_prompt(daemon, gpu=GPUS[0])
    restart(daemon, pin="auto")
    assert [hits(daemon, prompt, gpu=GPUS[0]) for prompt in [*prompts, new]] == [3, 3, 3, 3]
    daemon.audit()
