"""POST /kv/match and GET /instances, over HTTP, with an index that observes events by hand."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from msgspec import to_builtins

from kvserver.config import Settings
from kvserver.kv_events.types import KeysStored, ReaderConnected, Tier
from kvserver.observability import Observability
from kvserver.protocol import SGLANG_HASH, SGLANG_PAIRS_HASH, DescribeScheduler
from kvserver.protocol.status import DaemonStatus, EngineStatus, InstanceStatus
from kvserver.routing import MOST_BODY_BYTES, KVIndex, MatchPages
from kvserver.routing.block_hashes import hash_blocks, hash_pages
from kvserver.routing.match import JSON, MSGPACK, RecentEngineStats
from kvserver.server import Upkeep
from kvserver.web.pages import StatusPages

PREFIX, START = b"r" * 64, b"s" * 32
TOKENS = list(range(1000, 1200))
LOAD = EngineStatus(running=3, waiting=1)
INSTANCE = InstanceStatus(
    instance_id="engine",
    model_name="model",
    namespace="00",
    world_size=1,
    block_tokens=16,
    chunk_tokens=64,
    l0_source="none",
    load=LOAD,
)


def reader_of(name: str = "engine", **more: Any) -> ReaderConnected:
    fields = {"instance_id": name, "incarnation": "1", "model_name": "model", "variant": "", "hash_start": START}
    known = {"hash_algorithm": "sha256", "hash_block_tokens": 16}
    return ReaderConnected(1, 0, DescribeScheduler(**{**fields, **known, **more}), PREFIX, 4, 16)


def hashes_of(tokens: list[int], lora: tuple[str, str] | None = None, salt: str = "") -> list[bytes]:
    return list(hash_blocks("sha256", START, 16, tokens, lora, salt))


class Pages:
    """The pages with an index of their own, and one connection that is kept."""

    def __init__(self, served: StatusPages) -> None:
        self.index = KVIndex(64 << 20, follow_engines=True)
        self.asked = 0
        served.match = MatchPages(self.index, self._ask)
        self.connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=10)

    def _ask(self) -> Future[list[InstanceStatus]]:
        self.asked += 1
        return _done([INSTANCE])

    def store(self, hashes: list[bytes], tier: Tier = Tier.L1) -> None:
        self.index.observe(KeysStored(tier, PREFIX, hashes[3::4]))

    def send(self, body: bytes, content_type: str = JSON, **headers: str) -> tuple[int, bytes, str]:
        self.connection.request("POST", "/kv/match", body, {"Content-Type": content_type, **headers})
        answer = self.connection.getresponse()
        return answer.status, answer.read(), answer.headers["Content-Type"]

    def ask(self, **query: Any) -> dict[str, Any]:
        code, body, _ = self.send(json.dumps(query).encode())
        found: dict[str, Any] = json.loads(body)
        assert code == 200, found
        return found

    def refused(self, **query: Any) -> tuple[int, str]:
        code, body, _ = self.send(json.dumps(query).encode())
        found = json.loads(body)
        assert found["message"]
        return code, found["error"]

    def close(self) -> None:
        self.connection.close()
        self.index.close()


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


@pytest.fixture(scope="module")
def served() -> Iterator[StatusPages]:
    server = SimpleNamespace(
        call=lambda function: _done(function()),
        snapshot=lambda: DaemonStatus(instances=[INSTANCE]),
        rpc=SimpleNamespace(snapshot=dict),
        seconds_since_turn=0.0,
    )
    observability = Observability(Settings(), "boot")
    match = MatchPages(observability.index, Future)
    served = StatusPages(("127.0.0.1", 0), server, observability, match, cast(Upkeep, None))  # type: ignore[arg-type]
    served.start()
    yield served
    served.close()
    observability.observers.close()


@pytest.fixture
def pages(served: StatusPages) -> Iterator[Pages]:
    pages = Pages(served)
    yield pages
    pages.close()


def test_hashes_in_any_form_find_the_same(pages):
    hashes = hashes_of(TOKENS)
    pages.index.observe(reader_of())
    pages.store(hashes[:8])
    for form in (
        [h.hex() for h in hashes],
        [h[-8:].hex() for h in hashes],
        [int.from_bytes(h[-8:], "big") for h in hashes],
    ):
        (found,) = pages.ask(block_hashes=form)["instances"]
        assert (found["l0"], found["l1"], found["l2"], found["best"], found["blocks"]) == (0, 8, 0, 8, 12)
    for form in (
        {"block_hashes": b"".join(hashes)},
        {"block_hashes": hashes},
        {"block_hashes": b"".join(h[-8:] for h in hashes), "hash_bytes": 8},
    ):
        code, body, content_type = pages.send(msgspec.msgpack.encode(form), MSGPACK)
        assert (code, content_type) == (200, MSGPACK)
        assert msgspec.msgpack.decode(body)["instances"][0]["l1"] == 8


def test_an_answer_names_the_instance_and_how_busy_it_is(pages):
    pages.index.observe(reader_of())
    pages.ask(block_hashes=[])
    (found,) = pages.ask(block_hashes=[])["instances"]
    assert (found["instance_id"], found["model_name"]) == ("engine", "model")
    assert (found["block_tokens"], found["chunk_tokens"], found["load"]) == (16, 64, to_builtins(LOAD))
    assert pages.asked == 1, "engine stats are requested once in a while only"


def test_tokens_are_hashed_as_the_engine_does_it(pages):
    pages.index.observe(reader_of())
    pages.store(hashes_of(TOKENS))
    (found,) = pages.ask(model="model", tokens=TOKENS)["instances"]
    assert (found["l1"], found["blocks"]) == (12, 12)
    assert pages.ask(model="model", tokens=[*TOKENS[:100], 7, *TOKENS[101:]])["instances"][0]["l1"] == 4


@pytest.mark.parametrize(("lora", "salt"), [(("name", "/path"), ""), (None, "salt"), (("name", "/path"), "salt")])
def test_tokens_are_hashed_with_their_lora_and_salt(pages, lora, salt):
    pages.index.observe(reader_of())
    pages.store(hashes_of(TOKENS, lora, salt))
    query = {"model": "model", "tokens": TOKENS}
    names = dict(zip(("lora_name", "lora_path"), lora or ("", ""), strict=True))
    assert pages.ask(**query, **names, cache_salt=salt)["instances"][0]["l1"] == 12
    assert pages.ask(**query)["instances"][0]["l1"] == 0


def test_tokens_of_an_engine_that_hashes_finer_than_its_blocks_are_found(pages):
    pages.index.observe(reader_of(hash_block_tokens=4))
    fine = list(hash_blocks("sha256", START, 4, TOKENS, None, ""))
    pages.store(fine[3::4])
    assert pages.ask(model="model", tokens=TOKENS)["instances"][0]["l1"] == 12


def test_engines_that_hash_otherwise_are_each_asked_their_way_or_skipped(pages):
    for name, more in {"a": {}, "b": {"hash_algorithm": "sha256_cbor"}, "c": {"hash_algorithm": "xxhash"}}.items():
        pages.index.observe(reader_of(name, **more))
    pages.store(list(hash_blocks("sha256_cbor", START, 16, TOKENS, None, "")))
    answer = pages.ask(model="model", tokens=TOKENS)
    assert {found["instance_id"]: found["l1"] for found in answer["instances"]} == {"a": 0, "b": 12}
    assert [skipped["instance_id"] for skipped in answer["skipped"]] == ["c"]
    assert "xxhash" in answer["skipped"][0]["reason"]
    assert pages.refused(model="model", tokens=TOKENS, instance_ids=["c"]) == (400, "unsupported_hashes")


def test_other_models_and_instances_are_left_out(pages):
    for name, model in (("a", "x"), ("b", "x"), ("c", "y")):
        pages.index.observe(reader_of(name, model_name=model))

    def named(**query: Any) -> list[str]:
        return [found["instance_id"] for found in pages.ask(block_hashes=[], **query)["instances"]]

    assert named() == ["a", "b", "c"]
    assert named(model="x") == ["a", "b"]
    assert named(model="x", instance_ids=["b", "c"]) == ["b"]
    assert named(model="unknown") == []
    assert pages.ask(model="unknown", tokens=[1])["instances"] == []


@pytest.mark.parametrize(
    ("query", "error"),
    [
        ({}, "bad_query"),
        ({"block_hashes": [], "tokens": []}, "bad_query"),
        ({"block_hashes": "abc"}, "bad_query"),
        ({"block_hashes": [1.5]}, "bad_query"),
        ({"tokens": [1]}, "bad_query"),
        ({"model": "m", "tokens": [-1]}, "bad_query"),
        ({"model": "m", "tokens": [1], "lora_name": "no path"}, "bad_query"),
        ({"instance_ids": ["a"] * 1025, "block_hashes": []}, "bad_query"),
        ({"block_hashes": ["xyz"]}, "bad_hashes"),
        ({"block_hashes": ["00" * 7]}, "bad_hashes"),
        ({"block_hashes": ["00" * 33]}, "bad_hashes"),
        ({"block_hashes": [-1]}, "bad_hashes"),
        ({"block_hashes": [1 << 64]}, "bad_query"),
    ],
)
def test_what_makes_no_sense_is_refused_with_a_reason(pages, query, error):
    code, found = pages.refused(**query)
    assert (code, found) in ((400, error), (400, "bad_hashes"))
    assert pages.ask(block_hashes=[])["instances"] == [], "the connection goes on"


def test_hashes_that_are_not_whole_are_refused(pages):
    code, body, _ = pages.send(msgspec.msgpack.encode({"block_hashes": bytes(33)}), MSGPACK)
    assert (code, msgspec.msgpack.decode(body)["error"]) == (400, "bad_hashes")


@pytest.mark.parametrize("body", [b"", b"{", b"[" * 100_000, b"\xff", b"null"])
@pytest.mark.parametrize("content_type", [JSON, MSGPACK])
def test_malformed_body_is_refused_in_its_content_type(pages, body, content_type):
    code, answer, form = pages.send(body, content_type)
    assert (code, form) == (400, content_type)
    decoded = json.loads(answer) if form == JSON else msgspec.msgpack.decode(answer)
    assert decoded["error"] == "bad_query"


def test_other_content_types_are_refused(pages):
    assert pages.send(b"{}", "text/plain")[0] == 415
    assert pages.send(b'{"block_hashes": []}', JSON + "; charset=utf-8")[0] == 200


@pytest.mark.parametrize(("length", "code"), [(None, 411), ("many", 411), ("-1", 411), (str(MOST_BODY_BYTES + 1), 413)])
def test_a_body_of_unknown_or_too_many_bytes_is_not_read(pages, length, code):
    pages.connection.putrequest("POST", "/kv/match")
    pages.connection.putheader("Content-Type", JSON)
    if length is not None:
        pages.connection.putheader("Content-Length", length)
    pages.connection.endheaders()
    answer = pages.connection.getresponse()
    assert (answer.status, answer.will_close) == (code, True)


def test_the_largest_body_is_answered(pages):
    pages.index.observe(reader_of())
    head = len(msgspec.msgpack.encode({"block_hashes": bytes(MOST_BODY_BYTES - 100)})) - (MOST_BODY_BYTES - 100)
    hashes = bytes((MOST_BODY_BYTES - head) // 32 * 32)
    code, body, _ = pages.send(msgspec.msgpack.encode({"block_hashes": hashes}), MSGPACK)
    assert (code, msgspec.msgpack.decode(body)["instances"][0]["blocks"]) == (200, len(hashes) // 32)


def test_instances_are_shown_with_load_and_cache(pages):
    pages.index.observe(reader_of())
    pages.store(hashes_of(TOKENS))
    pages.connection.request("GET", "/instances")
    answer = pages.connection.getresponse()
    (found,) = json.loads(answer.read())["instances"]
    assert (answer.status, found["load"], found["world_size"], found["l0_source"]) == (
        200,
        to_builtins(LOAD),
        1,
        "none",
    )
    assert (found["incarnation"], found["l0"]["blocks"], found["l1"]["chunks"]) == ("1", 0, 3)


def test_an_instance_that_did_not_describe_itself_is_shown_without_cache(pages):
    pages.connection.request("GET", "/instances")
    (found,) = json.loads(pages.connection.getresponse().read())["instances"]
    assert found["instance_id"] == "engine"
    assert "l1" not in found


def test_engine_stats_that_cannot_be_read_keep_their_last_values():
    futures: list[Future[Any]] = [_done([INSTANCE]), Future(), Future()]
    asked: list[Future[Any]] = []

    def ask() -> Future[Any]:
        asked.append(futures.pop(0))
        return asked[-1]

    loads = RecentEngineStats(ask, every_seconds=0.0)
    assert loads.read() == {}
    assert loads.read() == {"engine": LOAD}
    assert len(asked) == 2
    assert loads.read() == {"engine": LOAD}
    assert len(asked) == 2, "the loop is asked once at a time"
    asked[1].set_exception(RuntimeError("the loop failed"))
    with contextlib.suppress(IndexError):
        assert loads.read() == {"engine": LOAD}


# ---- SGLang beside vLLM ---------------------------------------------------------------------------

SGLANG_PREFIX = b"g" * 64


def with_sglang(pages: Pages, pairs: bool = False) -> list[bytes]:
    """An SGLang whose pages of 16 tokens are in L1 but for the last; the whole hashes of all as SGLang has them."""
    algorithm = SGLANG_PAIRS_HASH if pairs else SGLANG_HASH
    scheduler = DescribeScheduler("sglang", "1", "model", "", hash_algorithm=algorithm, hash_block_tokens=16)
    pages.index.observe(ReaderConnected(1, 0, scheduler, SGLANG_PREFIX, 1, 16))
    keys = list(hash_pages(16, TOKENS, "", pairs))
    pages.index.observe(KeysStored(Tier.L1, SGLANG_PREFIX, keys[:-1]))
    return [key[24:] + key[:24] for key in keys]


def signed(value: bytes) -> int:
    return int.from_bytes(value[:8], "big", signed=True)


@pytest.mark.parametrize(
    "form", [lambda h: h.hex(), lambda h: h[:8].hex(), signed, lambda h: int.from_bytes(h[:8], "big")]
)
def test_blocks_of_sglang_are_found_by_each_form_of_its_hashes(pages: Pages, form: Any) -> None:
    whole = with_sglang(pages)
    assert any(signed(one) < 0 for one in whole)
    (found,) = pages.ask(model="model", instance_ids=["sglang"], block_hashes=[form(one) for one in whole])["instances"]
    assert (found["blocks"], found["l1"], found["best"]) == (12, 11, 11)


def test_blocks_of_sglang_are_found_by_hashes_end_to_end(pages: Pages) -> None:
    whole = with_sglang(pages)
    for size in (32, 16, 8):
        body = {"model": "model", "hash_bytes": size, "block_hashes": b"".join(one[:size] for one in whole)}
        code, raw, _ = pages.send(msgspec.msgpack.encode(body), MSGPACK)
        assert code == 200
        assert [one["l1"] for one in msgspec.msgpack.decode(raw)["instances"]] == [11]


def test_tokens_are_hashed_for_each_engine_as_it_hashes(pages: Pages) -> None:
    with_sglang(pages)
    pages.index.observe(reader_of())
    pages.store(hashes_of(TOKENS)[:4])
    answer = pages.ask(model="model", tokens=TOKENS)
    assert {one["instance_id"]: one["l1"] for one in answer["instances"]} == {"sglang": 11, "engine": 4}
    salted = pages.ask(model="model", tokens=TOKENS, cache_salt="other")
    assert {one["instance_id"]: one["l1"] for one in salted["instances"]} == {"sglang": 0, "engine": 0}
    answer = pages.ask(model="model", tokens=TOKENS, lora_name="a", lora_path="/a")
    assert answer["skipped"] == [
        {"instance_id": "sglang", "reason": "sglang hashes the id that SGLang gives a LoRA; send block_hashes"}
    ]


def test_pages_of_sglang_that_hash_each_token_with_the_next_are_found_by_tokens_and_by_hashes(pages: Pages) -> None:
    whole = with_sglang(pages, pairs=True)
    for query in ({"tokens": TOKENS}, {"block_hashes": [signed(one) for one in whole]}):
        (found,) = pages.ask(model="model", **query)["instances"]
        assert (found["blocks"], found["l1"]) == (12, 11)
    (found,) = pages.ask(model="model", tokens=TOKENS[:48])["instances"]
    assert (found["blocks"], found["l1"]) == (2, 2), "the third page depends on the token behind it"


def test_answers_keep_their_order_where_engines_of_both_kinds_are_asked(pages: Pages) -> None:
    whole = with_sglang(pages)
    pages.index.observe(reader_of("a"))
    pages.index.observe(reader_of("z"))
    answer = pages.ask(model="model", block_hashes=[signed(one) for one in whole])
    assert [(one["instance_id"], one["l1"]) for one in answer["instances"]] == [("sglang", 11), ("a", 0), ("z", 0)]


def test_tokens_that_sglang_cannot_have_are_refused(pages: Pages) -> None:
    with_sglang(pages)
    assert pages.refused(model="model", tokens=[1 << 40] * 16)[0] == 400
