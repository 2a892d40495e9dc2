"""A streaming session grows in place, and what was computed from its first turn counted to its end: its namespace, so that images of a later
turn were shared under names that users gave; that the tail of its prompt was stored; its boundaries; its wishes.
"""

from __future__ import annotations

from typing import Any

import pytest
from hybrids import full, window
from made_up_model import BLOCK, prompt
from modelless import Answer, Engine
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.request import Request

CHUNK = 64
ENDED = "WAITING_FOR_STREAMING_REQ"
FIRST, SECOND = prompt(1, 2 * CHUNK + 10), prompt(2, 2 * CHUNK)


def image(offset: int) -> list[MultiModalFeatureSpec]:
    """Under a name that a user gave. Fresh, since vLLM moves a session's images."""
    return [
        MultiModalFeatureSpec(None, "image", "users-name", PlaceholderRange(offset=offset, length=40), "users-name")
    ]


def turn(engine: Engine, tokens: list[int], count: int = 2, **options: Any) -> list[int]:
    """One turn of the session, to its end; the session's prompt then."""
    options.setdefault("sampling", None)
    if "mm_features" in options:  # as for a model with an encoder
        engine.scheduler.max_num_encoder_input_tokens = 1000
        engine.scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=1000)
    engine.add("session", tokens, count=count, resumable=True, **options)
    engine.run(until=lambda: engine.status_of("session") == ENDED)
    engine.finish_steps()
    return list(engine.scheduler.requests["session"].prompt_token_ids)


def end(engine: Engine) -> None:
    parameters = SamplingParams(max_tokens=1, temperature=0.0)
    engine.scheduler.add_request(Request("session", [], parameters, None))
    engine.run()


def ask(engine: Engine, name: str, tokens: list[int], images: Any = ()) -> Answer:
    """Of another engine: a prompt that begins like the session's."""
    engine.scheduler.max_num_encoder_input_tokens = 1000
    engine.scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=1000)
    return engine.generate(name, [*tokens, 5], mm_features=list(images))


@pytest.mark.parametrize("asynchronous", [True, False], ids=["async", "sync"])
def test_images_of_a_later_turn_are_shared_with_no_other_engine(make_daemon, make_engine, asynchronous):
    daemon = make_daemon(chunk_tokens=CHUNK)
    engine = make_engine(daemon, asynchronous=asynchronous)
    turn(engine, FIRST)
    shared = {store.variant for store in engine.stores}
    so_far = turn(engine, SECOND, mm_features=image(10))
    begins = len(so_far) - len(SECOND)
    end(engine)
    before, after = ([s for s in engine.stores if (s.variant in shared) is known] for known in (True, False))
    last = max(store.first_chunk + len(store.keys) // 32 for store in before if store.chunk_blocks == CHUNK // BLOCK)
    assert last * CHUNK <= begins + 10, "only chunks in front of the image are in the shared namespace"
    assert any(store.first_chunk == 0 for store in after), "the engine itself can find all of it"
    other = make_engine(daemon)
    assert ask(other, "other", so_far, image(begins + 10)).external == 0


def test_the_engine_itself_finds_a_session_with_images_again(make_daemon, make_engine):
    daemon = make_daemon(chunk_tokens=CHUNK)
    engine = make_engine(daemon, extra={"kvserver.on_prefix_reset": "keep"})
    turn(engine, FIRST)
    so_far = turn(engine, SECOND, mm_features=image(10))
    end(engine)
    assert engine.scheduler.reset_prefix_cache()
    found = ask(engine, "again", so_far, image(len(so_far) - len(SECOND) + 10))
    assert found.external == len(so_far) // CHUNK * CHUNK


def test_every_turns_prompt_has_its_tail_stored(make_daemon, make_engine):
    daemon = make_daemon(chunk_tokens=CHUNK, tails="on")
    engine = make_engine(daemon)
    turn(engine, FIRST)
    so_far = turn(engine, prompt(2, CHUNK + 25), count=CHUNK)
    turn(engine, prompt(3, 5))  # the turn before is no prompt's end of this one
    found = make_engine(daemon).generate("other", [*so_far, 5])
    end(engine)
    assert found.external == len(so_far) // BLOCK * BLOCK > len(so_far) // CHUNK * CHUNK


def test_windows_at_the_end_of_every_turns_prompt_are_kept(make_daemon, make_engine):
    daemon = make_daemon(chunk_tokens=CHUNK)
    hybrid = {"layers": [full(), window(CHUNK), window(CHUNK)], "num_blocks": 200}
    engine = make_engine(daemon, **hybrid)
    turn(engine, FIRST)
    so_far = turn(engine, prompt(2, 2 * CHUNK), count=3 * CHUNK)
    end(engine)
    assert make_engine(daemon, **hybrid).generate("other", [*so_far, 5]).external == len(so_far) // CHUNK * CHUNK


def test_a_wish_of_a_later_turn_counts_from_then_on(make_daemon, make_engine):
    daemon = make_daemon(chunk_tokens=CHUNK)
    engine = make_engine(daemon)
    turn(engine, FIRST)
    before = len(engine.stores)
    assert before
    wish = {"extra_args": {"kv_transfer_params": {"kvserver.no_store": True}}}
    turn(engine, SECOND, sampling=wish)
    turn(engine, SECOND)  # states none
    assert len(engine.stores) == before
    turn(engine, SECOND, sampling={"extra_args": {"kv_transfer_params": {"kvserver.no_store": False}}})
    end(engine)
    assert len(engine.stores) > before
