"""The scheduler's thread looked at a LoRA's files at every chunk, which on a slow file system held up all requests; and all the same files that
were replaced between the look and the step that vLLM computed were missed. Each LoRA that there ever was stayed in memory.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from made_up_model import prompt
from model_folder import write_lora
from support.daemon import wait_until
from vllm.lora.request import LoRARequest

CHUNK = 64
TOKENS = prompt(1, 2 * CHUNK + 10)


def adapter(folder: Path, seed: int, name: str = "sql") -> LoRARequest:
    return LoRARequest(name, seed, str(write_lora(folder, seed=seed)))


class Looks:
    """At folders: by which threads, and whether they return."""

    def __init__(self) -> None:
        self.threads: list[int] = []
        self.go_on = threading.Event()
        self.go_on.set()
        self._walk = os.walk

    def walk(self, *of: Any, **options: Any) -> Any:
        self.threads.append(threading.get_ident())
        assert self.go_on.wait(30)
        return self._walk(*of, **options)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Looks]:
    looks = Looks()
    monkeypatch.setattr(os, "walk", looks.walk)
    yield looks
    looks.go_on.set()


@pytest.mark.parametrize("asynchronous", [True, False], ids=["async", "sync"])
def test_only_the_first_request_of_a_lora_looks_at_its_files_on_the_schedulers_thread(
    make_daemon, make_engine, tmp_path, looks, asynchronous
):
    daemon = make_daemon(chunk_tokens=CHUNK)
    engine = make_engine(daemon, asynchronous=asynchronous, max_tokens_per_step=CHUNK)
    lora = adapter(tmp_path / "lora", 1)
    engine.generate("first", TOKENS, lora_request=lora)
    looks.threads.clear()
    engine.generate("long", prompt(2, 5 * CHUNK), lora_request=lora)
    assert daemon.status()["l1"]["chunks"] == 7
    assert looks.threads
    assert threading.get_ident() not in looks.threads
    assert make_engine(daemon).generate("warm", TOKENS, lora_request=lora).external == 2 * CHUNK


def test_files_that_do_not_answer_hold_up_no_request(make_daemon, make_engine, tmp_path, looks):
    daemon = make_daemon(chunk_tokens=CHUNK)
    engine = make_engine(daemon, extra={"kvserver.on_prefix_reset": "keep"})
    lora = adapter(tmp_path / "lora", 1)
    engine.generate("first", TOKENS, lora_request=lora)
    assert engine.scheduler.reset_prefix_cache()
    looks.go_on.clear()
    tuned = engine.add("tuned", [*TOKENS, *prompt(3, CHUNK)], lora_request=lora)
    engine.add("plain", prompt(2, 2 * CHUNK))
    engine.run(10)
    assert (tuned.right, tuned.external) == (True, 0), "it waits for a moment, and is computed"
    assert engine.answers["plain"].right
    assert engine.pool.get_num_free_blocks() == engine.num_blocks - 1
    assert daemon.status()["l1"]["chunks"] == 2 + 2, "the first request's and the plain one's"
    looks.go_on.set()
    assert engine.scheduler.reset_prefix_cache()
    assert engine.generate("again", TOKENS, lora_request=lora).external == 2 * CHUNK


@pytest.mark.parametrize("asynchronous", [True, False], ids=["async", "sync"])
def test_files_that_are_replaced_while_the_step_runs_are_not_stored_as_the_old_ones(
    make_daemon, make_engine, tmp_path, asynchronous
):
    """vLLM reads a LoRA in the step that needs it, after the scheduler has planned the step's stores."""
    daemon = make_daemon(chunk_tokens=CHUNK)
    engine = make_engine(daemon, asynchronous=asynchronous)
    lora = adapter(tmp_path / "lora", 1)
    engine.generate("first", TOKENS, lora_request=lora)
    engine.before_step = lambda plan: write_lora(tmp_path / "lora", seed=2) and None
    engine.generate("replaced", prompt(2, 3 * CHUNK), lora_request=lora)
    engine.before_step = lambda plan: None
    engine.generate("later", prompt(3, CHUNK))
    assert daemon.status()["l1"]["chunks"] == 2 + 1
    assert engine.connector.scheduler.counters["dropped_stores"] > 0


def test_loras_beyond_a_number_run_without_cache(make_daemon, make_engine, tmp_path, monkeypatch):
    """Forgotten they would be new again, whatever files vLLM's blocks are of."""
    monkeypatch.setattr("kvserver.adapters.vllm.loras.MOST_LORAS", 2)
    daemon = make_daemon(chunk_tokens=CHUNK)
    engine = make_engine(daemon)
    loras = [adapter(tmp_path / str(seed), seed, str(seed)) for seed in range(1, 5)]
    for number, lora in enumerate(loras):
        engine.generate(f"cold{number}", TOKENS, lora_request=lora)
    assert daemon.status()["l1"]["chunks"] == 2 * 2
    assert engine.connector.scheduler.counters["unknown_lora_requests"] == 2
    other = make_engine(daemon)
    assert [other.generate(f"warm{n}", TOKENS, lora_request=lora).external for n, lora in enumerate(loras)] == [
        2 * CHUNK, 2 * CHUNK, 0, 0,
    ]  # fmt: skip


def test_a_lora_is_known_by_its_stamps_after_its_files_were_removed(make_daemon, make_engine, tmp_path):
    daemon = make_daemon(chunk_tokens=CHUNK)
    engine = make_engine(daemon)
    lora = adapter(tmp_path / "lora", 1)
    engine.generate("first", TOKENS, lora_request=lora)
    for path in (tmp_path / "lora").iterdir():
        path.unlink()
    engine.generate("removed", prompt(2, 3 * CHUNK), lora_request=lora)
    wait_until(lambda: daemon.status()["l1"]["chunks"] == 2)
