"""Two engines with two versions of one plugin had equal identities: the second found the KV that the first one's model code had made,
and answered wrong tokens.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from engines import TIMEOUTS, Engine, Engines, Prompt
from support.daemon import Daemon
from their_code import PLUGINS, write

CHUNK = 64
# It scales keys as it loads them, and leaves all else to vLLM's Llama.
SOURCE = """
def register():
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.llama import LlamaForCausalLM

    class Scaled(LlamaForCausalLM):
        def load_weights(self, weights):
            return super().load_weights((name, each * SCALE if "k_proj" in name else each) for name, each in weights)

    ModelRegistry.register_model("LlamaForCausalLM", Scaled)
"""


@pytest.mark.long
def test_engines_share_with_the_same_version_of_a_plugin_and_with_no_other(
    engines: Engines, start_daemon: Callable[..., Daemon], prompt: Callable[..., Prompt], tmp_path: Path
) -> None:
    def started(name: str, scale: str) -> Engine:
        source = f"SCALE = {scale}\n{SOURCE}"
        write(tmp_path / name, "their_plugin", {"their_plugin.py": source}, "1.0", PLUGINS)
        path = os.pathsep.join([str(tmp_path / name), *filter(None, [os.environ.get("PYTHONPATH")])])
        return engines.get(name, dtype="float32", runner="v1", extra=TIMEOUTS, environ={"PYTHONPATH": path})

    names = {"one": "1.0", "other": "0.5", "again": "1.0"}
    one, other, again = (started(name, scale) for name, scale in names.items())
    start_daemon(chunk_tokens=CHUNK)
    text = prompt(1, 700)

    def asked(engine: Engine) -> tuple[int, list[int]]:
        answer = engine.generate([text])[0]
        engine.wait_for_stores()
        return answer["cached_tokens"], answer["tokens"]

    first = asked(one)
    second = asked(other)
    assert (first[0], second[0], first[1] != second[1]) == (0, 0, True)
    assert asked(again) == (700 // CHUNK * CHUNK, first[1])
