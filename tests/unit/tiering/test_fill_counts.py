"""What is reported of fills: which tokens were loaded from L2, to the engine and in the status."""

from __future__ import annotations

from support.daemon import wait_until
from support.filling import filling, requests_of
from support.worker import make_keys

from kvserver.protocol import LookupReply


def test_tokens_from_l2_are_a_source_of_their_own() -> None:
    with filling() as f:
        keys = make_keys(4)
        f.only_in_l2(keys)
        assert f.fill(keys) == 4
        f.loaded(keys)
        tokens = 4 * 64
        f.worker.end_request(prompt_tokens=tokens + 10, loaded_tokens=tokens, loads=1)
        wait_until(lambda: requests_of(f).ended_requests)
        requests = requests_of(f)
        assert requests.prompt_tokens == {"l0": 0, "l1": 0, "l2": tokens, "computed": 10}
        assert (requests.fills, requests.filled_tokens) == (1, tokens)


def test_the_reply_counts_the_chunks_of_each_tier() -> None:
    """Those that a request's own fill read are of L2; what L1 has by then, of L1."""
    with filling() as f:
        keys = make_keys(6)
        f.only_in_l2(keys)
        assert f.reply(f.begin(keys[:2], "first")) == LookupReply(2, 2, l2_chunks=2)
        assert f.reply(f.begin(keys, "second")) == LookupReply(6, 6, l2_chunks=4)
        assert f.lookup(keys, "third") == LookupReply(6, 6)
        assert f.reply(f.begin(keys, "fourth")) == LookupReply(6, 6)


def test_an_engine_states_what_it_loaded_from_l2() -> None:
    """It knows better: of what was read for it, it had two chunks itself."""
    with filling() as f:
        keys = make_keys(4)
        f.only_in_l2(keys)
        assert f.fill(keys) == 4
        f.worker.end_request(prompt_tokens=266, local_tokens=128, loaded_tokens=128, l2_tokens=64, loads=1)
        wait_until(lambda: requests_of(f).ended_requests)
        assert requests_of(f).prompt_tokens == {"l0": 128, "l1": 64, "l2": 64, "computed": 10}


def test_an_engine_cannot_state_more_than_it_loaded() -> None:
    with filling() as f:
        f.store(make_keys(1))
        f.worker.end_request(prompt_tokens=100, loaded_tokens=64, l2_tokens=90, loads=1)
        wait_until(lambda: requests_of(f).ended_requests)
        assert requests_of(f).prompt_tokens == {"l0": 0, "l1": 0, "l2": 64, "computed": 36}
