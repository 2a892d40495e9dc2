"""Without prefix caching and a processor cache vLLM names images by a counter of the process: after a restart one image
found the KV of another. Names that users give mean as little to another engine.
"""

from __future__ import annotations

from typing import Any

import pytest
from made_up_model import prompt
from modelless import Answer, Engine
from vllm.config import MultiModalConfig
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

CHUNK = 64
TOKENS = prompt(1, 2 * CHUNK + 10)


def multimodal(prefix_caching: bool, cache_gb: float) -> dict[str, Any]:
    def adjust(config: Any, caches: Any) -> None:
        config.model_config.multimodal_config = MultiModalConfig(mm_processor_cache_gb=cache_gb)
        config.cache_config.enable_prefix_caching = prefix_caching

    return {"adjust": adjust}


def show(engine: Engine, name: str, image: str) -> Answer:
    """A prompt with an image, which the scheduler knows by the name that is in the keys."""
    engine.scheduler.max_num_encoder_input_tokens = 1000  # as for a model with an encoder
    engine.scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=1000)
    where = PlaceholderRange(offset=10, length=40)
    return engine.generate(name, TOKENS, mm_features=[MultiModalFeatureSpec(None, "image", image, where, image)])


def test_an_engine_that_counts_its_images_shares_with_no_other_and_reports_that(make_daemon, make_engine):
    daemon = make_daemon()
    trusting = {"kvserver.trust_multi_modal_uuids": True}
    for name in ("cat", "dog"):
        engine = make_engine(daemon, extra=trusting, **multimodal(prefix_caching=False, cache_gb=0))
        assert show(engine, name, "renderer0-mm-1-image-0").external == 0
    assert all("named by a counter" in instance["private"] for instance in daemon.status()["instances"])


@pytest.mark.parametrize(("prefix_caching", "cache_gb"), [(True, 0), (False, 4)])
def test_an_engine_that_names_images_by_their_content_is_not_private(
    make_daemon, make_engine, prefix_caching, cache_gb
):
    daemon = make_daemon()
    for _ in range(2):
        make_engine(daemon, **multimodal(prefix_caching, cache_gb))
    assert [instance["private"] for instance in daemon.status()["instances"]] == ["", ""]
    assert len({instance["namespace"] for instance in daemon.status()["instances"]}) == 1


@pytest.mark.parametrize(("trusts", "expected"), [(False, 0), (True, 2 * CHUNK)])
def test_names_that_users_may_have_given_are_shared_only_if_a_setting_allows_it(
    make_daemon, make_engine, trusts, expected
):
    daemon = make_daemon()
    settings = {"kvserver.trust_multi_modal_uuids": trusts, "kvserver.on_prefix_reset": "keep"}
    options = {"extra": settings, **multimodal(True, 4)}
    one, other = make_engine(daemon, **options), make_engine(daemon, **options)
    assert show(one, "cat", "picture-1").external == 0
    assert show(other, "dog", "picture-1").external == expected
    assert one.scheduler.reset_prefix_cache()
    assert show(one, "cat again", "picture-1").external == 2 * CHUNK, "an engine always finds its own"
    one.generate("text", prompt(9, CHUNK + 5))
    assert other.generate("text", prompt(9, CHUNK + 5)).external == CHUNK, "and prompts without images are shared"
