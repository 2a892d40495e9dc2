"""`kvserver doctor --engine` of an SGLang server, and its line on the engines of the daemon."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.daemon import Daemon
from support.doctor import flags, rows
from support.http_pages import page_servers, text_page
from support.worker import Worker, make_keys

from kvserver.cli import checks_engine
from kvserver.cli.checks import Level

MakeDaemon, MakeWorker = Callable[..., Daemon], Callable[..., Worker]
Serve = Callable[[Any], str]
OTHERS = {"page_size": 64, "attention_backend": "fa3", "version": "0.5.23", "api_key": "secret"}


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Serve a body as /server_info, without /metrics, as SGLang does without --enable-metrics; the address."""
    with page_servers() as start:
        yield lambda body: start(text_page(json.dumps(body), "/server_info"))


def info(**extra: str) -> dict[str, Any]:
    config = {
        "linker": "KVServerLinker",
        "linker_module_path": "kvserver.adapters.sglang",
        "linker_extra_config": extra,
    }
    return {
        **OTHERS,
        "enable_unified_cache_external_linker": True,
        "unified_cache_external_linker_backend": "dynamic",
        "unified_cache_external_linker_config": config,
    }


def only(url: str, endpoint: str) -> tuple[str, Level, str, str]:
    ((name, finding),) = checks_engine.engine_findings(url, endpoint)
    return name, finding.level, finding.text, finding.fix


def sglang(daemon: Daemon, make_worker: MakeWorker, name: str, **fields: object) -> Worker:
    worker = make_worker(daemon, instance_id=name, connect_now=False)
    worker.attach()
    return worker.register(engine="sglang", engine_version="0.5.23", **fields)


def test_sglang_whose_cache_is_on_is_well(make_daemon: MakeDaemon, make_worker: MakeWorker, serve: Serve) -> None:
    daemon = make_daemon()
    sglang(daemon, make_worker, "llama-1").round_trip()
    sglang(daemon, make_worker, "llama-2")
    url = serve(info(**{"kvserver.engine_id": "llama-1", "kvserver.endpoint": daemon.endpoint}))
    name, level, text, _ = only(url, daemon.endpoint)
    assert name.endswith("(llama-1)")
    assert level is Level.OK
    assert text.startswith("the cache of SGLang 0.5.23 is on: ")
    assert text.endswith(" 1 loads, 0 failed")
    as_text = info(**{"kvserver.engine_id": "llama-1"})
    as_text["unified_cache_external_linker_config"] = json.dumps(as_text["unified_cache_external_linker_config"])
    assert only(serve(as_text), daemon.endpoint)[2] == text


def test_sglang_that_shares_with_none_is_reported_with_the_reason(
    make_daemon: MakeDaemon, make_worker: MakeWorker, serve: Serve
) -> None:
    daemon = make_daemon()
    sglang(daemon, make_worker, "llama-1", private="epoch: private since prefix reset")
    _, level, text, fix = only(serve(info()), daemon.endpoint)
    assert level is Level.WARNING
    assert "shares KV with no other engine: epoch: private since prefix reset" in text
    assert "kvserver.on_prefix_reset=keep" in fix


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (OTHERS, "SGLang 0.5.23 without kvserver's linker"),
        ({**info(), "enable_unified_cache_external_linker": False}, "without kvserver's linker"),
        ({**info(), "unified_cache_external_linker_config": {"linker_module_path": "x"}}, "without kvserver's linker"),
        (info(**{"kvserver.endpoint": "ipc:///elsewhere"}), "with another daemon than"),
        (info(**{"kvserver.engine_id": "llama-1"}), "the daemon knows no SGLang 'llama-1'"),
        ({**info(), "version": "\x1b[2J" + "9" * 900}, "the daemon knows no SGLang"),
        ([1], "cannot be read"),
        ({"page_size": 1}, "cannot be read"),
        ({**info(), "unified_cache_external_linker_config": "{"}, "cannot be read"),
    ],
)
def test_whatever_an_address_answers_is_a_finding(
    make_daemon: MakeDaemon, make_worker: MakeWorker, serve: Serve, body: Any, words: str
) -> None:
    daemon = make_daemon()
    make_worker(daemon, instance_id="llama-1")  # of another engine
    _, level, text, fix = only(serve(body), daemon.endpoint)
    assert level is not Level.OK
    assert words in text
    assert text.isprintable()
    assert "secret" not in text + fix
    assert fix


def test_sglang_without_a_daemon_is_reported(serve: Serve, tmp_path: Any) -> None:
    _, level, text, fix = only(serve(info()), f"ipc://{tmp_path}/none")
    assert level is Level.PROBLEM
    assert "no daemon answers at" in text
    assert "kvserver serve" in fix


def test_doctor_names_the_daemons_engines_and_why_one_shares_with_none(
    make_daemon: MakeDaemon, make_worker: MakeWorker
) -> None:
    daemon = make_daemon()
    assert rows(*flags(daemon))[1]["engines"]["text"] == "none is connected"
    make_worker(daemon, instance_id="older")
    worker = sglang(daemon, make_worker, "llama-1")
    found = rows(*flags(daemon))[1]["engines"]
    assert (found["level"], found["text"]) == ("ok", "older, llama-1 (sglang 0.5.23)")
    worker.send(worker.description(private="epoch: private since prefix reset"))
    worker.lookup(make_keys(1))
    found = rows(*flags(daemon))[1]["engines"]
    assert found["level"] == "warning"
    assert found["text"] == "llama-1 (sglang 0.5.23) shares KV with no other: epoch: private since prefix reset"
