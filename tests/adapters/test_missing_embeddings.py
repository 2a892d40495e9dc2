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
from made_up_model import prompt
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


@pytest.fixture
def make(make_engine: MakeEngine) -> MakeEngine:
    def made(daemon: Daemon, adjust: Any = accepting, **options: Any) -> Engine:
        trusting = {"kvserver.trust_multi_modal_uuids": True, **options.pop("extra", {})}
        engine = make_engine(daemon, extra=trusting, adjust=adjust, **options)
        engine.scheduler.max_num_encoder_input_tokens = 1000  # as for a model with an encoder
        engine.scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=1000)
        return engine

    return made


def item(name: str, *parts: str) -> MultiModalFeatureSpec:
    """An image of which these parts arrived; its content's name is in the keys."""
    field = MultiModalBatchedField(keep_on_cpu=True)
    data = Item({part: MultiModalFieldElem(data=torch.ones(3), field=field) for part in parts}) if parts else None
    return MultiModalFeatureSpec(data, "image", name, PlaceholderRange(offset=BEFORE_IMAGE, length=IMAGE_TOKENS), name)


def show(engine: Engine, request: str, image: MultiModalFeatureSpec) -> Answer:
    answer = engine.add(request, TOKENS, mm_features=[image])
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

    assert show(make(make_daemon(), both), "cat", item("cat", *SIZE)).right


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


def test_an_engine_whose_cache_is_off_refuses_images_without_embeddings(
    make_daemon: MakeDaemon, make: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connector, "unsupported", lambda *_: "a test")
    engine = make(make_daemon())
    assert engine.connector.scheduler is None
    assert show(engine, "cat", item("cat", *SIZE)).finish_reason == "error"
    assert show(engine, "the cat", item("cat", *WHOLE)).right
