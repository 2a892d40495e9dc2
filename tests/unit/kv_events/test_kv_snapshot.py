"""`GET /kv/snapshot`: the resident blocks and the batch after which it is, for late consumers."""

from __future__ import annotations

import gzip
import http.client
import json
import tracemalloc
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, cast

import msgspec
import pytest
from support.daemon import wait_until
from support.kv_feed import chunk, named, namespace_prefix
from support.kv_publisher import Published, from_snapshot

from kvserver.config import Settings
from kvserver.kv_events import snapshot, snapshot_parts
from kvserver.kv_events.types import Tier
from kvserver.observability import Observability
from kvserver.routing import MatchPages
from kvserver.server import Server, Upkeep
from kvserver.web.pages import StatusPages

HERE = namespace_prefix("weights")


@pytest.fixture
def published() -> Iterator[Published]:
    """With one instance, and some chunks."""
    made = Published()
    made.feed.reader_connected("engine", HERE)
    made.feed.stored(HERE, chunk("a", "b"), chunk("a", "c"))
    made.feed.stored(HERE, chunk("a", "b"), tier=Tier.L2)
    yield made
    made.close()


@pytest.fixture
def pages(published: Published) -> Iterator[StatusPages]:
    observability = Observability(Settings(), "boot")
    observability.publisher = published.publisher
    match = cast(MatchPages, None)
    no_loop, no_upkeep = cast(Server, None), cast(Upkeep, None)
    made = StatusPages(("127.0.0.1", 0), no_loop, observability, match, no_upkeep)
    made.start()
    yield made
    made.close()
    observability.observers.close()


def get(pages: StatusPages, query: str = "", **headers: str) -> tuple[http.client.HTTPResponse, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", pages.port, timeout=10)
    connection.request("GET", "/kv/snapshot" + query, headers={k.replace("_", "-"): v for k, v in headers.items()})
    response = connection.getresponse()
    body = response.read()
    connection.close()
    return response, body


def json_lines(body: bytes) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    header, *events = [json.loads(line) for line in body.splitlines()]
    return header, events


def blocks(events: list[dict[str, Any]]) -> set[tuple[str, int | None, Any]]:
    return {(event["medium"], event["group_idx"], name) for event in events for name in event["block_hashes"]}


def test_snapshot_names_the_resident_blocks_and_the_last_batch_before_it(
    pages: StatusPages, published: Published
) -> None:
    response, body = get(pages)
    header, events = json_lines(body)
    assert (response.status, response.headers["Content-Type"]) == (200, "application/x-ndjson")
    assert response.headers["Transfer-Encoding"] == "chunked"
    assert header == {
        "format": "kvserver-kv-snapshot/1",
        "boot_id": "boot",
        "model": "model",
        "hash_form": "int",
        "topic": "",
        "sequence": published.stream().sequence,
        "events": 3,
        "pending_chunks": 0,
    }
    assert blocks(events) == published.feed.blocks(HERE)


def test_snapshot_agrees_with_the_stream_at_its_batch(published: Published) -> None:
    subscriber = published.subscriber()
    for number in range(20):
        published.feed.stored(HERE, chunk(f"{number}"))
        taken = published.publisher.snapshot()
        if number % 3 == 0:
            published.feed.removed(HERE, chunk(f"{number}"))
        for _, sequence, payload in subscriber.replay(published.boot_micros + 1):
            if sequence <= taken.sequence:
                subscriber.apply(sequence, payload)
        assert (subscriber.last, subscriber.blocks.resident) == (taken.sequence, from_snapshot(taken).resident)


def test_chunks_are_in_a_snapshot_once_they_are_published(published: Published) -> None:
    elsewhere = namespace_prefix("elsewhere")
    for at in range(20):
        published.feed.stored(elsewhere, *(chunk(f"{at}.{i}") for i in range(256)))
    subscriber = published.subscriber()
    published.feed.reader_connected("late", elsewhere)
    taken = published.publisher.snapshot()
    consumer = from_snapshot(taken)
    assert taken.pending + len(taken.chunks) == len(published.feed.resident)
    last = published.sequence()
    for _, _, payload in subscriber.replay(taken.sequence + 1):
        consumer.apply(payload)  # which fails for a block that is published twice
    assert published.stream().sequence >= last
    assert consumer.resident == published.feed.blocks(HERE, elsewhere)


def test_whole_hashes_are_hexadecimal_in_json_and_bytes_in_msgpack(pages: StatusPages, published: Published) -> None:
    published.feed.reader_connected("raw", HERE, form="bytes")
    published.sequence(1)
    _, events = json_lines(get(pages, "?form=bytes")[1])
    assert {name for event in events for name in event["block_hashes"]} == {named(name).hex() for name in "abc"}
    response, body = get(pages, "?form=bytes", Accept="application/msgpack")
    header, *maps = msgspec.msgpack.decode(body)
    assert response.headers["Content-Type"] == "application/msgpack"
    assert (header["hash_form"], header["events"]) == ("bytes", 3)
    assert blocks(maps) == published.feed.blocks(HERE, form="bytes")


def test_snapshot_is_compressed_for_a_client_that_accepts_gzip(pages: StatusPages, published: Published) -> None:
    for at in range(8):
        published.feed.stored(HERE, *(chunk(*(f"{at}.{i}.{j}" for j in range(16))) for i in range(250)))
    plain, packed = get(pages)[1], get(pages, Accept_Encoding="gzip")
    assert packed[0].headers["Content-Encoding"] == "gzip"
    assert len(packed[1]) < len(plain) / 2
    assert json_lines(gzip.decompress(packed[1]))[1] == json_lines(plain)[1]


@pytest.mark.parametrize(("encoding", "packed"), [("json", False), ("msgpack", False), ("msgpack", True)])
def test_body_of_a_snapshot_uses_the_memory_of_one_part(
    published: Published, encoding: snapshot.Encoding, packed: bool
) -> None:
    for at in range(40):
        published.feed.stored(HERE, *(chunk(*(f"{at}.{i}.{j}" for j in range(16))) for i in range(250)))
    taken = published.publisher.snapshot()
    with snapshot_parts(taken, encoding, gzip=False) as plain:
        whole = sum(map(len, plain))
    tracemalloc.start()
    try:
        with snapshot_parts(taken, encoding, packed) as parts:
            largest = max(map(len, parts))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert largest < whole / 15
    assert most < whole / 5


def test_a_request_for_an_unknown_stream_receives_the_known_ones(pages: StatusPages, published: Published) -> None:
    response, body = get(pages, "?model=other")
    there = {"model": "model", "form": "int", "topics": [""]}
    assert (response.status, json.loads(body)["streams"]) == (404, [there])
    published.feed.reader_connected("raw", HERE, form="bytes")
    response, body = get(pages, "?model=model")
    assert (response.status, json.loads(body)["streams"]) == (400, [there, {**there, "form": "bytes"}])
    assert get(pages, "?model=model&form=int")[0].status == 200
    assert get(pages, "?modell=model")[0].status == 400
    pages.make_kv_snapshot = None
    response, body = get(pages)
    assert (response.status, json.loads(body)["error"]) == (404, "no KV events are published: set --kv-events-endpoint")


def test_fifth_snapshot_beside_four_is_refused_with_a_time_to_retry(pages: StatusPages, published: Published) -> None:
    with ExitStack() as begun:
        for _ in range(4):
            begun.enter_context(snapshot_parts(published.publisher.snapshot(), "json", gzip=False))
        response, _ = get(pages)
        assert (response.status, response.headers["Retry-After"]) == (503, "1")
    assert get(pages)[0].status == 200


def test_readers_that_go_away_leave_room_for_others(pages: StatusPages, published: Published) -> None:
    for at in range(40):
        published.feed.stored(HERE, *(chunk(*(f"{at}.{i}.{j}" for j in range(16))) for i in range(256)))
    for _ in range(6):
        connection = http.client.HTTPConnection("127.0.0.1", pages.port, timeout=10)
        connection.request("GET", "/kv/snapshot")
        assert connection.getresponse().status in (200, 503)
        connection.close()
    wait_until(lambda: get(pages)[0].status == 200)
