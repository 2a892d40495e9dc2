"""The scheduler half looked for a new session of its link behind an answer to vLLM, which voided the answer: the load that vLLM had been
promised failed. It looks there for models with states alone. At its end an aborted request drops its stores first, whatever fails behind that.
"""

from __future__ import annotations

from made_up_model import prompt

CHUNK = 64
TOKENS = prompt(1, 4 * CHUNK + 10)


def test_load_promised_before_a_new_session_is_loaded(make_daemon, make_engine):
    daemon = make_daemon(tails="on")
    first, engine = make_engine(daemon), make_engine(daemon)
    first.generate("cold", TOKENS)
    half = engine.connector.scheduler
    decide, answered = half._loading.tokens_to_load, []

    def decide_and_connect_anew(*args):
        found = decide(*args)
        if found and not answered:
            answered.append(found)
            half._link.session = half._link._connect()
        return found

    half._loading.tokens_to_load = decide_and_connect_anew
    warm = engine.add("warm", TOKENS)
    engine.run()
    assert warm.right
    assert answered
    assert warm.external == answered[0]
    assert half.counters["failed_loads"] == 0


def test_fault_at_an_abort_does_not_keep_the_requests_stores(make_daemon, make_engine, monkeypatch):
    engine = make_engine(make_daemon(), may_fail=True)
    half = engine.connector.scheduler
    dropped = []
    drop = half._storing._acceptance.drop_request
    monkeypatch.setattr(half._storing._acceptance, "drop_request", lambda state: (dropped.append(state), drop(state)))
    engine.add("r", TOKENS, count=30)
    for _ in range(3):
        engine.step()
    with monkeypatch.context() as patched:
        patched.setattr(half._dispatcher, "usable", lambda: 1 / 0)
        engine.abort("r")
    engine.finish_steps()
    assert len(dropped) == 1
    assert engine.errors()


def test_fault_in_a_new_session_does_not_keep_failed_loads(make_daemon, make_engine, monkeypatch):
    engine = make_engine(make_daemon(), may_fail=True)
    half = engine.connector.scheduler
    engine.generate("one", TOKENS)
    begun = []
    monkeypatch.setattr(half._loading._failed, "begin_session", begun.append)
    with monkeypatch.context() as patched:
        patched.setattr(half._storing._acceptance, "drop_all", lambda: 1 / 0)
        half._link.session = half._link._connect()
        half._dispatcher.usable()
    assert len(begun) == 1
    assert engine.errors()
