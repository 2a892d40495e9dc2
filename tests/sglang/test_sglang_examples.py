"""The commands of pages and examples that start an SGLang: SGLang parses their flags, and the linker its settings."""

from __future__ import annotations

import importlib
import json
import re
import shlex
from pathlib import Path

import pytest
import yaml
from sglang.srt.server_args import ServerArgs, prepare_server_args

from kvserver.adapters.common.settings import read_settings
from kvserver.adapters.sglang.events import events_of
from kvserver.adapters.sglang.settings import SGLangSettings
from kvserver.cli import checks_sglang

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", ROOT / "adapters/README.md", *sorted((ROOT / "deploy").glob("**/*.md"))]


def commands() -> dict[str, list[str]]:
    """The words behind `sglang serve`, by place."""
    found = {}
    for page in PAGES:
        for number, block in enumerate(re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL)):
            if match := re.search(r"^sglang serve (.*?[^\\])$(?=\n(?!  )|\Z)", block, re.DOTALL | re.MULTILINE):
                words = shlex.split(match[1].replace("\\\n", " ").removesuffix("&"))
                found[f"{page.relative_to(ROOT)}-{number}"] = words
    services = yaml.safe_load((ROOT / "deploy/compose.sglang.yaml").read_text())["services"]
    found["compose"] = [re.sub(r"^\$\{\w+:-(.*)\}$", r"\1", word) for word in services["sglang"]["command"][2:]]
    patch = yaml.safe_load((ROOT / "deploy/kubernetes/components/sglang/engine.yaml").read_text())
    (container,) = patch["spec"]["template"]["spec"]["containers"]
    found["kubernetes"] = [word.replace("$(POD_NAME)", "vllm-0") for word in container["command"][2:]]
    return found


COMMANDS = commands()


def test_every_page_with_a_command_is_read() -> None:
    assert {place.rpartition("-")[0] for place in COMMANDS} >= {"adapters/README.md", "deploy/guides/sglang.md"}


@pytest.mark.parametrize("place", COMMANDS)
def test_sglang_parses_the_flags_and_the_linker_its_settings(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        ServerArgs, "__post_init__", lambda self: None, raising=False
    )  # which looks for the model and a GPU
    args = prepare_server_args(COMMANDS[place])
    assert args.enable_unified_cache_external_linker
    assert args.unified_cache_external_linker_backend == "dynamic"
    config = args.unified_cache_external_linker_config
    config = json.loads(config) if isinstance(config, str) else config
    assert hasattr(importlib.import_module(config["linker_module_path"]), config["linker"])
    settings = read_settings(SGLangSettings, config["linker_extra_config"])
    assert settings.engine_id
    assert args.page_size >= 16
    if args.kv_events_config:
        assert events_of(args.kv_events_config, None).endpoint


def test_engines_of_the_examples_have_different_names() -> None:
    names = [
        json.loads(words[words.index("--unified-cache-external-linker-config") + 1])["linker_extra_config"][
            "kvserver.engine_id"
        ]
        for words in COMMANDS.values()
    ]
    assert len(set(names)) == len(names) >= 4


def test_doctor_reads_the_arguments_of_a_real_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer of `/server_info` has every field of ServerArgs, by name."""
    monkeypatch.setattr(ServerArgs, "__post_init__", lambda self: None, raising=False)
    args = prepare_server_args(COMMANDS["compose"])
    names = checks_sglang.Arguments.__struct_fields__
    told = {name: getattr(args, name) for name in names if name != "version"}
    found = checks_sglang.read(json.dumps({**told, "version": "0.5.23"}))
    assert found is not None
    assert found.linker["linker"] == "KVServerLinker"
