"""A prompt that was computed in several steps is stored in several messages, of which none named the chunk before it: each was a chain of its own
to a file tier, which then evicted prompts from their start.
"""

from __future__ import annotations

from hybrids import HYBRIDS
from made_up_model import prompt

from kvserver.protocol import KEY_BYTES, RegisterWorker, Store

CHUNK = 64  # tokens: the test daemon's chunk_tokens
STEP = 100  # tokens


def stores_of(tap, group: int = 0) -> list[Store]:
    """Of one prompt, in its order."""
    return sorted((store for store in tap.of(Store) if store.group == group), key=lambda store: store.first_chunk)


def test_each_store_message_names_the_last_chunk_of_the_message_before(make_daemon, make_engine, make_tap, tmp_path):
    daemon = make_daemon(l2=f"file://{tmp_path}/l2?size=64MiB")
    tap = make_tap(daemon)
    tokens = prompt(1, 6 * CHUNK + 5)
    make_engine(tap.endpoint, max_tokens_per_step=STEP).generate("cold", tokens, count=1)
    stores = stores_of(tap)
    assert len(stores) > 2
    assert [store.after for store in stores] == [None, *[store.keys[-KEY_BYTES:] for store in stores[:-1]]]

    tap.received.clear()
    warm = make_engine(tap.endpoint)
    assert warm.generate("warm", tokens[: 4 * CHUNK] + prompt(2, 2 * CHUNK), count=1).external == 4 * CHUNK
    (store,) = stores_of(tap)
    known = b"".join(each.keys for each in stores)
    assert store.after == known[3 * KEY_BYTES : 4 * KEY_BYTES], "the last chunk of its hit"


def test_only_store_messages_of_full_attention_name_a_chunk_before_them(make_daemon, make_engine, make_tap, tmp_path):
    """A window needs not all before it: one that was dropped must not keep later ones out."""
    model = HYBRIDS["nemotron"]
    tap = make_tap(make_daemon(l2=f"file://{tmp_path}/l2?size=64MiB"))
    engine = make_engine(tap.endpoint, max_tokens_per_step=2 * model.chunk, **model.options)
    engine.generate("cold", prompt(3, 6 * model.chunk + 5), count=1)
    kinds = [group.kind for group in tap.of(RegisterWorker)[0].groups]
    by_kind = {kind: stores_of(tap, group) for group, kind in enumerate(kinds)}
    assert all(by_kind[kind] for kind in model.kinds)
    assert {kind for kind, stores in by_kind.items() if any(store.after for store in stores)} == {"full"}


def test_store_messages_without_l2_name_no_chunk_before_them(make_daemon, make_engine, make_tap):
    tap = make_tap(make_daemon())
    make_engine(tap.endpoint, max_tokens_per_step=STEP).generate("cold", prompt(4, 6 * CHUNK + 5), count=1)
    assert len(stores_of(tap)) > 2
    assert not any(store.after for store in stores_of(tap))
