"""Before vLLM 0.32 a streaming session that goes on drops its last sampled token and keeps the block's hash of it, and every later
hash continues that one. Its chunks were stored under these, and served to prompts that do have the token. Such sessions run without
cache now, and an engine that had one stores nothing any more.
"""

from __future__ import annotations

import pytest
import vllm
from made_up_model import continuation, prompt
from modelless import Engine
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

CHUNK = 64
BEGIN = prompt(1, CHUNK - 1)  # with the token that is sampled next it fills a chunk
SAMPLED = continuation(BEGIN, 1)
MORE = [5 if SAMPLED != [5] else 6, *prompt(2, 2 * CHUNK)]  # what the session goes on with instead


class _Kept(list):
    def __delitem__(self, which) -> None:
        return


@pytest.fixture
def before_0_32(monkeypatch):
    """vLLM's session update without the line that drops hashes, under a version that has none."""
    update = Scheduler._update_request_as_session

    def keeps_hashes(self, session, changes):
        session.block_hashes = _Kept(session.block_hashes)
        update(self, session, changes)
        session.block_hashes = list(session.block_hashes)

    monkeypatch.setattr(Scheduler, "_update_request_as_session", keeps_hashes)
    monkeypatch.setattr(vllm, "__version__", "0.31.0")


def run_session(engine: Engine) -> None:
    """BEGIN, one token, then MORE in its place, one token, the end."""
    waiting = "WAITING_FOR_STREAMING_REQ"
    engine.add("session", BEGIN, count=1, resumable=True)
    engine.run(until=lambda: engine.status_of("session") == waiting)
    request = engine.scheduler.requests["session"]
    engine.add("session", MORE, count=1, resumable=True)
    engine.run(until=lambda: engine.status_of("session") == waiting)
    assert list(request.prompt_token_ids) == BEGIN + MORE
    parameters = SamplingParams(max_tokens=1, temperature=0.0)
    engine.scheduler.add_request(Request("session", [], parameters, None))  # its end
    engine.run()


@pytest.mark.parametrize("asynchronous", [True, False], ids=["async", "sync"])
def test_sessions_of_older_vllms_run_without_cache(make_daemon, make_engine, before_0_32, asynchronous):
    daemon = make_daemon(chunk_tokens=CHUNK)
    engine = make_engine(daemon, asynchronous=asynchronous)
    run_session(engine)
    make_engine(daemon).generate("other", BEGIN + SAMPLED + MORE[1:])
    assert not engine.stores


def test_what_older_vllms_have_in_their_own_cache_after_a_session_is_not_stored(make_daemon, make_engine, before_0_32):
    """It has the session's blocks under the same hashes; a request that hits them computes upon foreign KV, without our doing."""
    daemon = make_daemon(chunk_tokens=CHUNK)
    make_engine(daemon).generate("cold", prompt(3, 2 * CHUNK))
    engine = make_engine(daemon)
    run_session(engine)
    assert engine.generate("loads", prompt(3, 2 * CHUNK)).external > 0
    engine.generate("computes", prompt(4, 2 * CHUNK))
    assert not engine.stores


@pytest.mark.parametrize("asynchronous", [True, False], ids=["async", "sync"])
def test_sessions_of_this_vllm_are_served(make_daemon, make_engine, asynchronous):
    daemon = make_daemon(chunk_tokens=CHUNK)
    run_session(make_engine(daemon, asynchronous=asynchronous))
    assert make_engine(daemon).generate("dropped", BEGIN + SAMPLED + MORE[1:]).external == 0
    assert make_engine(daemon).generate("kept", BEGIN + MORE).external == len(BEGIN + MORE) - 1
