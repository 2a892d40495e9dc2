"""Images without embeddings, which vLLM lets engines receive that load: their KV is found, or the request is refused.

vLLM's worker raises for an image that it must compute and has only the size of, and the engine ends.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from made_up_model import BLOCK, prompt
from modelless import Answer, Engine
from sibling import beside_sibling
from support.daemon import Daemon
from vllm.config import MultiModalConfig
from vllm.multimodal.inputs import MultiModalBatchedField, MultiModalFeatureSpec, MultiModalFieldElem, PlaceholderRange
from vllm.multimodal.inputs import MultiModalKwargsItem as Item
from vllm.multimodal.parse import MultiModalDataParser
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

from kvserver.adapters.vllm import connector
from kvserver.adapters.vllm.missing_embeddings import MissingEmbeddings
from kvserver.adapters.vllm.shortage import PATIENCE

pytestmark = pytest.mark.skipif(
    not hasattr(MultiModalConfig(), "allow_missing_mm_embeddings"), reason="this vLLM accepts no such prompts"
)
CHUNK = 64
TOKENS = prompt(1, 3 * CHUNK + 10)
BEFORE_IMAGE, IMAGE_TOKENS = CHUNK + 10, 40
MakeDaemon = Callable[..., Daemon]
MakeEngine = Callable[..., Engine]


class Parser(MultiModalDataParser):
    """The parser of a model whose images have a grid and are vectors."""

    embedding_fields: ClassVar[Any] = {"image": {"image_embeds": "values", "image_grid_thw": "metadata"}}


def accepting(config: Any, caches: Any) -> None:
    """Adjust a configuration as vLLM's front end does under a role that loads."""
    config.model_config.multimodal_config = MultiModalConfig(allow_missing_mm_embeddings=True)


def computing_no_size(execute: Callable[..., Any]) -> Callable[..., Any]:
    """Raise as vLLM's worker does for an item that it must compute and of which only the size arrived."""
    items: dict[str, list[MultiModalFeatureSpec]] = {}

    def executed(output: Any) -> Any:
        items.update({new.req_id: new.mm_features for new in output.scheduled_new_reqs})
        for request, numbers in output.scheduled_encoder_inputs.items():
            for number in numbers:
                data = items[request][number].data
                assert data is None or {"image_embeds", "pixel_values"} & data.keys(), "vLLM's worker would raise"
        return execute(output)

    return executed


@pytest.fixture
def make(make_engine: MakeEngine) -> MakeEngine:
    def made(daemon: Daemon, adjust: Any = accepting, **options: Any) -> Engine:
        trusting = {"kvserver.trust_multi_modal_uuids": True, **options.pop("extra", {})}
        engine = make_engine(daemon, extra=trusting, adjust=adjust, **options)
        engine.execute = computing_no_size(engine.execute)  # type: ignore[method-assign]
        engine.scheduler.max_num_encoder_input_tokens = 1000  # as for a model with an encoder
        engine.scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=1000)
        return engine

    return made


def item(name: str, *parts: str, offset: int = BEFORE_IMAGE, length: int = IMAGE_TOKENS) -> MultiModalFeatureSpec:
    """An image of which these parts arrived; its content's name is in the keys. Vectors and pixels go to the device."""
    field = {part: MultiModalBatchedField(keep_on_cpu=part not in ("image_embeds", "pixel_values")) for part in parts}
    found = {part: MultiModalFieldElem(data=torch.ones(3), field=field[part]) for part in parts}
    place = PlaceholderRange(offset=offset, length=length)
    return MultiModalFeatureSpec(Item(found) if parts else None, "image", name, place, name)


def show(
    engine: Engine, request: str, image: MultiModalFeatureSpec, tokens: list[int] = TOKENS, **options: Any
) -> Answer:
    answer = engine.add(request, tokens, mm_features=[image], **options)
    engine.run()
    return answer


def refused(engine: Engine) -> int:
    return engine.connector.scheduler.counters["missing_embeddings_requests"]


SIZE = ("image_grid_thw",)
WHOLE = ("image_embeds", "image_grid_thw")


def test_an_image_without_embeddings_is_loaded_and_never_that_of_another_image(
    make_daemon: MakeDaemon, make: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "vllm.kvserver")
    daemon = make_daemon()
    show(make(daemon), "cat", item("cat", *WHOLE))
    decode = make(daemon)
    cat = show(decode, "cat", item("cat", *SIZE))
    assert (cat.right, cat.external) == (True, 3 * CHUNK)
    dog = show(decode, "dog", item("dog", *SIZE))  # the same tokens
    assert (dog.finish_reason, dog.tokens, refused(decode)) == ("error", [], 1)
    assert "came without embeddings" in caplog.text
    whole = show(decode, "the dog", item("dog", *WHOLE))
    assert (whole.right, whole.external) == (True, 0), "of another image only what is before it is shared, which it has"


@pytest.mark.parametrize("parts", [WHOLE, ("pixel_values", "image_grid_thw"), ()])
def test_an_image_that_an_engine_can_compute_is_never_refused(
    make_daemon: MakeDaemon, make: MakeEngine, parts: tuple[str, ...]
) -> None:
    engine = make(make_daemon())
    assert show(engine, "cat", item("cat", *parts)).right
    assert refused(engine) == 0


def test_vllm_decides_where_another_connector_may_bring_kv(make_daemon: MakeDaemon, make: MakeEngine) -> None:
    def both(config: Any, caches: Any) -> None:
        accepting(config, caches)
        beside_sibling(config, caches)

    with pytest.raises(AssertionError, match="would raise"):
        show(make(make_daemon(), both), "cat", item("cat", *SIZE))


@pytest.mark.parametrize("receives", [True, False])
def test_vllm_decides_where_the_engine_receives_embeddings_from_others(receives: bool) -> None:
    multimodal = SimpleNamespace(allow_missing_mm_embeddings=True)
    config = SimpleNamespace(
        model_config=SimpleNamespace(multimodal_config=multimodal),
        ec_transfer_config=SimpleNamespace(is_ec_consumer=receives),
    )
    scheduler = SimpleNamespace(encoder_cache_mismatch_reqs=set())

    def asks(self: Any) -> bool:
        """Ask as vLLM's scheduler does, whose set is found among the callers' variables."""
        request = SimpleNamespace(request_id="cat", mm_features=[item("cat", *SIZE)])
        return MissingEmbeddings(config, alone=True).refuses(request, 0)

    assert asks(scheduler) is not receives
    assert scheduler.encoder_cache_mismatch_reqs == (set() if receives else {"cat"})


def test_an_image_without_embeddings_is_refused_where_the_daemon_ends_during_its_load(
    make_daemon: MakeDaemon, make: MakeEngine
) -> None:
    daemon = make_daemon(pauses=True)
    show(make(daemon), "cat", item("cat", *WHOLE))
    decode = make(daemon)
    with daemon.paused_copies():
        answer = decode.add("cat", TOKENS, mm_features=[item("cat", *SIZE)])
        decode.run(until=lambda: bool(decode.loads))
        daemon.kill()
        decode.run()
    assert (answer.finish_reason, answer.tokens, refused(decode)) == ("error", [], 1)
    assert show(decode, "next", item("cat", *WHOLE)).right


@pytest.mark.parametrize("parts", [SIZE, ("image_grid_thw", "timestamps")])
@pytest.mark.parametrize("sampling", [{}, {"prompt_logprobs": 1}])
def test_an_engine_whose_cache_is_off_refuses_images_without_embeddings(
    make_daemon: MakeDaemon,
    make: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    parts: tuple[str, ...],
    sampling: dict[str, Any],
) -> None:
    monkeypatch.setattr(connector, "unsupported", lambda *_: "a test")
    engine = make(make_daemon())
    assert engine.connector.scheduler is None
    assert show(engine, "cat", item("cat", *parts), sampling=sampling).finish_reason == "error"
    assert show(engine, "the cat", item("cat", *WHOLE)).right


def test_an_image_without_embeddings_is_refused_where_the_connector_has_a_fault(
    make_daemon: MakeDaemon, make: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(make_daemon(), may_fail=True)
    monkeypatch.setattr(engine.connector.scheduler, "matched_tokens", lambda *_: 1 // 0)
    assert show(engine, "cat", item("cat", *SIZE)).finish_reason == "error"
    assert show(engine, "the cat", item("cat", *WHOLE)).right


def test_the_last_block_of_an_image_without_embeddings_is_loaded_although_to_compute_it_would_be_cheaper(
    make_daemon: MakeDaemon, make: MakeEngine
) -> None:
    daemon, tokens, place = make_daemon(), prompt(1, 2 * CHUNK + 1), {"offset": 80, "length": 46}
    show(make(daemon), "cat", item("cat", *WHOLE, **place), tokens)
    decode = make(daemon)
    first = show(decode, "first", item("cat", *SIZE, **place), tokens)
    assert (first.right, first.external) == (True, 2 * CHUNK)
    filler = decode.add("filler", prompt(9, 92 * BLOCK - 8), count=1)  # takes the last block of the image
    decode.run()
    assert filler.right
    again = show(decode, "again", item("cat", *SIZE, **place), tokens)
    assert (again.right, again.local, again.external) == (True, 2 * CHUNK - BLOCK, BLOCK)


def test_requests_that_are_refused_wait_for_no_blocks(make_daemon: MakeDaemon, make: MakeEngine) -> None:
    """So stores that keep blocks are not cancelled for them."""
    daemon = make_daemon(pauses=True)
    engine = make(daemon)
    with daemon.paused_copies():
        whole = engine.add("whole", TOKENS, mm_features=[item("cat", *WHOLE)])
        engine.run(until=lambda: bool(whole.finish_reason and engine.stores))
        for number in range(3 * PATIENCE):
            dog = engine.add(f"dog {number}", prompt(50 + number, 150), mm_features=[item(f"dog {number}", *SIZE)])
            engine.run(until=lambda answer=dog: answer.finish_reason is not None)
    engine.run()
    assert refused(engine) == 3 * PATIENCE
    assert not any(plan.abort_stores for plan in engine.plans)
