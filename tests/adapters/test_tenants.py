"""Tenants of requests and engines: who may name one, whose chunks are then whose, and that only salts isolate."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_up_model import prompt
from modelless import Engine
from support.daemon import Daemon, wait_until

from kvserver.adapters.common.settings import read_settings
from kvserver.adapters.vllm.settings import AdapterSettings

CHUNK = 64
TOKENS = prompt(1, 3 * CHUNK)
TRUST = {"kvserver.trust_request_pins": True}
OF_A = {"kvserver.tenant": "a"}
MakeDaemon, MakeEngine = Callable[..., Daemon], Callable[..., Engine]


@pytest.fixture
def daemon(make_daemon: MakeDaemon, tmp_path: Path) -> Daemon:
    return make_daemon(share=["tenant:a=0.3", "tenant:b=0.3"], l2=f"file://{tmp_path}/l2?size=64MiB", tails="off")


def ask(engine: Engine, name: str, tokens: list[int] = TOKENS, tenant: object = None, salt: str | None = None) -> int:
    """Tokens that came from the daemon."""
    params = {"kvserver.tenant": tenant} if tenant is not None else {}
    engine.add(name, tokens, cache_salt=salt, sampling={"extra_args": {"kv_transfer_params": params}})
    engine.run()
    answer = engine.answers[name]
    assert answer.right
    return answer.external


def wait_for(daemon: Daemon, **chunks: int) -> None:
    """Wait until the tenants, and `rest`, have so many chunks in L1."""

    def found() -> dict[str, int]:
        l1 = daemon.status()["l1"]
        of_tenants = {name: use["chunks"] for name, use in l1["tenants"].items()}
        return of_tenants | {"rest": l1["chunks"] - sum(of_tenants.values())}

    expected = {"a": 0, "b": 0, "rest": 0} | chunks
    wait_until(lambda: found() == expected, 60, f"{expected} chunks; there are {found()}")


def test_chunks_belong_to_the_tenant_of_a_trusted_request_else_to_the_engines(
    daemon: Daemon, make_engine: MakeEngine
) -> None:
    engine = make_engine(daemon, extra=TRUST | OF_A)
    ask(engine, "its own", prompt(1, CHUNK))
    wait_for(daemon, a=1)
    ask(engine, "another", prompt(2, 2 * CHUNK), "b")
    wait_for(daemon, a=1, b=2)
    ask(engine, "of no share", prompt(3, CHUNK), "c")
    wait_for(daemon, a=1, b=2, rest=1)
    engine.close()
    ask(make_engine(daemon, extra=TRUST), "of none", prompt(4, CHUNK))
    wait_for(daemon, a=1, b=2, rest=2)


def test_a_tenant_of_a_request_that_is_not_trusted_is_refused_and_counted(
    daemon: Daemon, make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "vllm.kvserver")
    engine = make_engine(daemon, extra=OF_A)
    for number, (tenant, refused) in enumerate([("b", 1), ("c", 2), ("a", 2), (None, 2)], 1):
        ask(engine, f"{tenant}", prompt(number, CHUNK), tenant)
        assert engine.connector.scheduler.counters["refused_tenants"] == refused
        wait_for(daemon, a=number)
    assert sum("a request states a tenant" in record.getMessage() for record in caplog.records) == 1
    assert daemon.metric("kvserver_l1_other_tenant_stores_total") == 0


def test_a_further_turn_of_a_streaming_session_refuses_no_tenant_that_no_turn_named(
    daemon: Daemon, make_engine: MakeEngine
) -> None:
    engine = make_engine(daemon, extra=OF_A)
    for tokens in (prompt(1, CHUNK + 6), prompt(2, CHUNK)):
        engine.add("session", tokens, count=1, resumable=True)
        engine.run(until=lambda: engine.status_of("session") == "WAITING_FOR_STREAMING_REQ")
    engine.abort("session")
    engine.run()
    assert engine.connector.scheduler.counters["refused_tenants"] == 0
    wait_for(daemon, a=2)


@pytest.mark.parametrize("tenant", ["", "a b", "tenant:a", "a\n", "x" * 65, "\u00e4", 7, ["a"], True])
def test_a_name_that_no_tenant_can_have_counts_as_absent(
    daemon: Daemon, make_engine: MakeEngine, tenant: object
) -> None:
    engine = make_engine(daemon, extra=TRUST | OF_A)
    ask(engine, "odd", prompt(1, CHUNK), tenant)
    counters = engine.connector.scheduler.counters
    assert (counters["bad_wishes"], counters["refused_tenants"]) == (1, 0)
    wait_for(daemon, a=1)


@pytest.mark.parametrize("tenant", ["a b", "tenant:a", "a\n", "x" * 65])
def test_an_engine_with_a_name_that_no_tenant_can_have_is_refused(tenant: str) -> None:
    with pytest.raises(ValueError, match=r"kvserver\.tenant .* write text of the form"):
        read_settings(AdapterSettings, {"kvserver.tenant": tenant})


def test_two_tenants_share_a_prefix_and_two_salts_do_not_in_l1_and_in_l2(
    daemon: Daemon, make_engine: MakeEngine
) -> None:
    extra = TRUST | {"kvserver.fill_timeout_ms": 10_000}
    engine = make_engine(daemon, extra=extra)
    for salt in (None, "mine"):
        assert ask(engine, f"cold {salt}", tenant="a", salt=salt) == 0
    engine.close()
    wait_until(lambda: daemon.tier()["objects"] == 6, 60, "6 objects in L2")
    for tier in ("l1", "l2"):
        for salt, shares in ((None, True), (f"unknown before {tier}", False), ("mine", True)):
            engine = make_engine(daemon, extra=extra)
            found = ask(engine, f"{tier} {salt}", tenant="b", salt=salt)
            assert found == (len(TOKENS) - 1 if shares else 0), f"salt {salt} in {tier}"
            engine.close()
        daemon.terminate()
        daemon.start()


def test_a_tenants_name_is_no_part_of_its_engines_namespace(daemon: Daemon, make_engine: MakeEngine) -> None:
    engines: list[Any] = [make_engine(daemon, extra=extra) for extra in ({}, OF_A, {"kvserver.tenant": "b"})]

    def namespaces() -> list[str]:
        found = [one["namespace"] for one in daemon.status()["instances"]]
        return found if len(found) == len(engines) and all(found) else []

    assert len(set(wait_until(namespaces, 60, "all are registered"))) == 1
