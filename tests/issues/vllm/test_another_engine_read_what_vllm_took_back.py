"""A sibling's synchronous load failed in MultiConnector, after which vLLM computed the step anew. What kvserver had stored of
the first computation, garbage under the right key, another engine loaded: wrong tokens (see issues/adapters/test_kv_of_a_step_that_vllm_took_back_was_stored.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import TIMEOUTS, Engine, Engines, Prompt, engine_group
from support.daemon import Daemon


@pytest.fixture(scope="module")
def group(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    with engine_group(model, tmp_path_factory.mktemp("engines")) as group:
        yield group


def beside_failing_sibling(endpoint: str) -> dict[str, Any]:
    own = {
        "kv_connector": "KVServerConnector",
        "kv_connector_module_path": "kvserver.adapters.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"kvserver.endpoint": endpoint, "kvserver.on_prefix_reset": "keep", **TIMEOUTS},
    }
    other = {"kv_connector": "FailingSibling", "kv_connector_module_path": "failing_sibling", "kv_role": "kv_both"}
    return {
        "kv_connector": "MultiConnector",
        "kv_connector_module_path": None,
        "kv_connector_extra_config": {"connectors": [other, own]},
        "kv_load_failure_policy": "recompute",
    }


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_tokens_of_another_engine_are_right_after_a_siblings_load_failed(
    group: Engines, prompt: Callable[..., Prompt], runner: str
) -> None:
    daemon = Daemon(endpoint=group.endpoint, l1_size="64MiB", chunk_tokens=64).start()
    try:
        # A sibling promises the first 128 tokens of each prompt that is new to it, and brings none of them.
        writer: Engine = group.get(
            f"writer {runner}", runner=runner, dtype="float32", transfer=beside_failing_sibling(group.endpoint)
        )
        reader: Engine = group.get(
            f"reader {runner}", runner=runner, dtype="float32", extra=TIMEOUTS, measures_speed=False
        )
        group.wait_registered(daemon)
        prompts = [prompt(n, 700) for n in range(3)]
        reader.ask("reset_prefix_cache")
        control = [each["tokens"] for each in reader.generate(prompts)]
        reader.wait_for_stores()
        daemon.http("/cache/clear", "POST")
        reader.forget()
        for text in prompts:
            writer.generate([text])
        writer.wait_for_stores()
        assert [each["tokens"] for each in reader.generate(prompts)] == control
        assert writer.counters()["scheduler"]["dropped_stores"] > 0
    finally:
        daemon.close()
