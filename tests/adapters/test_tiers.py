"""L1 only, L2 only, both, several tiers of L2, none: every model is served, and every byte is right."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hybrids import HYBRIDS
from made_up_model import prompt
from model_folder import write_lora
from modelless import Engine
from support.daemon import Daemon, wait_until
from vllm.lora.request import LoRARequest

MakeDaemon = Callable[..., Daemon]
MakeEngine = Callable[..., Engine]
CHUNK = 64
MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    "full": (CHUNK, {}),
    **{name: (model.chunk, model.options) for name, model in sorted(HYBRIDS.items())},
}
TIERS = {
    "none": 0,
    "l1": 0,
    "l2": 1,  # and an L1 that has no space for two prompts
    "l1 and l2": 1,
    "several l2": 2,  # of which the first loses all
}


def prompt_of(name: str, which: str, number: int = 0) -> list[int]:
    return prompt(1000 * list(MODELS).index(name) + 10 * list(TIERS).index(which) + number, 5 * MODELS[name][0] + 20)


def wait_until_written(daemon: Daemon) -> None:
    """All that is READY in L1."""

    def written() -> bool:
        status = daemon.status()
        done = all(tier["objects"] and not tier["queue_objects"] for tier in status["l2"])
        return done and not status["books"]["tickets"]

    wait_until(written)


def restart(daemon: Daemon) -> None:
    wait_until_written(daemon)
    daemon.terminate()
    daemon.start()
    daemon.wait_for_tiers()


def test_lora_loads_from_l2_only_kv_of_its_own_files(
    make_daemon: MakeDaemon, make_engine: MakeEngine, tmp_path: Path
) -> None:
    daemon, tokens = make_daemon(l2=f"file://{tmp_path}/l2?size=64MiB"), prompt(7, 3 * CHUNK + 20)
    files = write_lora(tmp_path / "one")
    engine = make_engine(daemon)
    engine.generate("cold", tokens, lora_request=LoRARequest("sql", 1, str(files)))
    engine.close()
    restart(daemon)
    assert make_engine(daemon).generate("plain", tokens).external == 0
    assert (
        make_engine(daemon).generate("warm", tokens, lora_request=LoRARequest("sql", 1, str(files))).external
        == 3 * CHUNK
    )
    restart(daemon)
    write_lora(files, seed=1)
    assert make_engine(daemon).generate("changed", tokens, lora_request=LoRARequest("sql", 1, str(files))).external == 0


def test_kv_in_l2_is_not_found_after_the_weights_have_changed(
    make_daemon: MakeDaemon, make_engine: MakeEngine, tmp_path: Path
) -> None:
    """By a reset, unless a version names the weights."""
    daemon, tokens = make_daemon(l2=f"file://{tmp_path}/l2?size=64MiB"), prompt(8, 3 * CHUNK + 20)
    engine = make_engine(daemon)
    engine.generate("old", tokens)
    engine.close()
    restart(daemon)
    engine = make_engine(daemon)
    engine.generate("first", prompt(9, 40))
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    assert engine.generate("new", tokens).external == 0
    assert not engine.loads
    assert make_engine(daemon).generate("other", tokens).external == 3 * CHUNK


@pytest.mark.parametrize("which", TIERS)
def test_every_model_is_served_with_every_choice_of_tiers(
    make_daemon: MakeDaemon, make_engine: MakeEngine, tmp_path: Path, which: str
) -> None:
    """A hit is as long as one from memory, where anything has the prompt."""
    folders = [tmp_path / f"l2-{number}" for number in range(TIERS[which])]
    urls = " ".join(f"file://{folder}?size=64MiB" for folder in folders)
    daemon = make_daemon(env={"KVSERVER_L2": urls}, start=which != "none")
    expected = {}
    for name, (_, options) in MODELS.items():
        tokens, engine = prompt_of(name, which), make_engine(daemon, **options)
        engine.generate("cold", tokens)
        engine.close()
        other = make_engine(daemon, **options)
        expected[name] = other.generate("warm", tokens).external
        other.close()
    assert all((hit > 0) == (which != "none") for hit in expected.values())
    if folders:
        wait_until_written(daemon)
        daemon.terminate()
        for folder in folders[:-1]:
            shutil.rmtree(folder)
        if which == "l2":
            daemon.flags["l1_size"] = "512KiB"
        daemon.start()
        daemon.wait_for_tiers()
    for name, (_, options) in MODELS.items():
        engine = make_engine(daemon, **options)
        assert engine.generate("again", prompt_of(name, which)).external == expected[name], name
        half = engine.connector.scheduler
        assert half is not None
        loaded = {tier: half.counters[f"loaded_tokens_{tier}"] for tier in ("l1", "l2")}
        assert sum(loaded.values()) == expected[name], name
        assert bool(loaded["l2"]) == bool(folders), name
        engine.close()
    if which != "none":
        daemon.wait_for_accounting(tickets=0, pins=0)
