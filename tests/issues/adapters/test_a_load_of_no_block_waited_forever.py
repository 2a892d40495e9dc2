"""Where a hit needs no block of any group, as with a window of one token and no full attention, the load had no part: nothing ended it, and
the request waited forever."""

from __future__ import annotations

from hybrids import window
from made_up_model import prompt


def test_a_request_whose_load_has_no_block_is_computed(make_daemon, make_engine):
    daemon, tokens = make_daemon(), prompt(1, 5 * 64 + 10)
    options = {"layers": [window(1)] * 4, "num_blocks": 200, "extra": {"kvserver.lookup_timeout_ms": 5000}}
    make_engine(daemon, **options).generate("cold", tokens)
    warm = make_engine(daemon, **options)
    warm.generate("warm", tokens)
    assert warm.received == ["warm"]
    assert warm.worker.worker.counters["load_failures"] == 1
