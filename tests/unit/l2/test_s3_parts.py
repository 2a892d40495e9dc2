"""Large objects of S3, which are put and read in parts by several connections: whole or not at all."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator

import pytest
from support.daemon import wait_until
from support.ill_proxy import IllProxy
from support.l1_memory import PAGE, name, within
from support.s3 import S3Server, one_server
from support.shared_tiers import MakeDaemon, TierDaemon

from kvserver._native import RECORD_HEADER_BYTES
from kvserver.config import parse_tiers
from kvserver.l2 import ObjectMemory, TierOutcome
from kvserver.l2.remote import s3
from kvserver.l2.remote.store import StoreClient, StoreError, StoreRefused

_SIZE = 8 << 20  # four parts
_UPLOADED = 18 << 20  # four parts of an upload
_SECONDS = 100.0  # that no test takes
_LONG_NAME = "kvserver/1/" + "/".join("6e" * 32 for _ in range(3))
_PART = (_SIZE + RECORD_HEADER_BYTES) // 4
_SECOND_PART = f"bytes={_PART}-{2 * _PART - 1}"


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    yield from one_server()


@pytest.fixture
def proxy(server: S3Server) -> Iterator[IllProxy]:
    proxy = IllProxy(server.port)
    yield proxy
    proxy.close()


@pytest.fixture
def daemon(server: S3Server, proxy: IllProxy, prefix: str, make_daemon_of: MakeDaemon) -> TierDaemon:
    url = server.url_of(prefix, "timeout=60s").replace(str(server.port), str(proxy.port))
    return make_daemon_of(url, pages=4 * _UPLOADED // PAGE)


@pytest.fixture
def client(server: S3Server, proxy: IllProxy, prefix: str) -> Iterator[StoreClient]:
    url = server.url_of(prefix, "timeout=60s").replace(str(server.port), str(proxy.port))
    client = s3.connect(s3.S3Url(parse_tiers([url])[0]), _UPLOADED)
    yield client
    client.close()


@pytest.fixture
def stored(daemon: TierDaemon) -> ObjectMemory:
    memory = daemon.l1.object(_SIZE)
    assert daemon.put(name(1), memory, _SECONDS) is TierOutcome.DONE
    return memory


def only_first(change: Callable[[bytes], bytes]) -> Callable[[str, bytes], bytes]:
    """The first answer with the second part is changed, the next one is not."""
    left = [change]
    return lambda range, body: left.pop()(body) if range == _SECOND_PART and left else body


def always(change: Callable[[bytes], bytes]) -> Callable[[str, bytes], bytes]:
    return lambda range, body: change(body) if range == _SECOND_PART else body


def test_a_large_object_is_read_in_parts_at_once(daemon: TierDaemon, proxy: IllProxy, stored: ObjectMemory) -> None:
    all_parts = threading.Barrier(4)
    ranges: list[str] = []

    def together(range: str, body: bytes) -> bytes:
        ranges.append(range)
        all_parts.wait(_SECONDS)  # one at a time would never pass
        return body

    proxy.change = together
    read = daemon.l1.object(_SIZE)
    assert daemon.get(name(1), read, _SECONDS) is TierOutcome.DONE
    assert daemon.l1.read(read) == daemon.l1.read(stored)
    assert len(ranges) == len(set(ranges)) == 4


@pytest.mark.parametrize(("size", "parts"), [(2 << 20, 1), (4 << 20, 2), (8 << 20, 4), (34 << 20, 16)])
def test_the_header_of_a_record_is_no_part_of_its_own(
    client: StoreClient, proxy: IllProxy, server: S3Server, prefix: str, size: int, parts: int
) -> None:
    size += RECORD_HEADER_BYTES
    ranges: list[list[int]] = []
    proxy.change = lambda range, body: ranges.append([*map(int, range[6:].split("-"))]) or body
    server.write(f"{prefix}/1", bytes(size))
    (found,) = client.get([f"{prefix}/1"], [memoryview(bytearray(size))])
    if parts == 1:
        assert isinstance(found, memoryview)
        return
    assert callable(found)
    assert found(lambda at, piece: None) is True
    lengths = {last + 1 - first for first, last in ranges}
    assert len(ranges) == parts
    assert max(lengths) - min(lengths) < parts


def test_a_large_object_that_the_store_refuses_costs_one_request_a_part(client: StoreClient, proxy: IllProxy) -> None:
    proxy.ill, proxy.status = {("GET", "/1")}, (403, "AccessDenied")
    (read,) = client.get(["p/1"], [memoryview(bytearray(_SIZE))])
    assert callable(read)
    assert isinstance(read(lambda at, piece: None), StoreRefused)
    assert 0 < proxy.refused <= 4


def test_a_part_that_is_short_once_is_read_again(daemon: TierDaemon, proxy: IllProxy, stored: ObjectMemory) -> None:
    proxy.change = only_first(lambda body: body[:-1])
    read = daemon.l1.object(_SIZE)
    assert daemon.get(name(1), read, _SECONDS) is TierOutcome.DONE
    assert daemon.l1.read(read) == daemon.l1.read(stored)


def test_a_part_that_hangs_once_is_read_again(
    daemon: TierDaemon, proxy: IllProxy, stored: ObjectMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    monkeypatch.setattr(s3._S3Client, "_piece_seconds", 10.0)
    proxy.change = only_first(lambda body: body * release.wait(_SECONDS))
    read = daemon.l1.object(_SIZE)
    try:
        assert daemon.get(name(1), read, _SECONDS) is TierOutcome.DONE
    finally:
        release.set()
    assert daemon.l1.read(read) == daemon.l1.read(stored)


@pytest.mark.parametrize(
    ("change", "outcome"),
    [
        (lambda body: body[:-1], TierOutcome.UNAVAILABLE),
        (lambda body: body[:-1] + bytes([body[-1] ^ 1]), TierOutcome.CORRUPT),
    ],
    ids=["short", "flipped"],
)
def test_an_object_with_a_wrong_part_is_not_read(
    daemon: TierDaemon,
    proxy: IllProxy,
    stored: ObjectMemory,
    change: Callable[[bytes], bytes],
    outcome: TierOutcome,
) -> None:
    proxy.change = always(change)
    assert daemon.get(name(1), daemon.l1.object(_SIZE), _SECONDS) is outcome


def test_parts_of_two_writes_are_never_one_object(
    server: S3Server, daemon: TierDaemon, proxy: IllProxy, stored: ObjectMemory, prefix: str
) -> None:
    """The object is replaced before a part is requested once more. It is refused, and not deleted as one that fails its checks."""
    (where,) = [each for each in server.objects() if each.startswith(prefix)]
    other = server.read(where)[::-1]

    def replace(body: bytes) -> bytes:
        server.write(where, other)
        return body[:-1]

    proxy.change = only_first(replace)
    assert daemon.get(name(1), daemon.l1.object(_SIZE), _SECONDS) is TierOutcome.UNAVAILABLE
    assert server.read(where) == other


def test_an_object_that_is_removed_between_its_parts_is_missing(
    server: S3Server, daemon: TierDaemon, proxy: IllProxy, stored: ObjectMemory, prefix: str
) -> None:
    (where,) = [each for each in server.objects() if each.startswith(prefix)]

    def remove(body: bytes) -> bytes:
        server.remove(where)
        return body[:-1]

    proxy.change = only_first(remove)
    assert daemon.get(name(1), daemon.l1.object(_SIZE), _SECONDS) is TierOutcome.MISSING


@pytest.mark.parametrize("size", [0, 100, _PART + 1, _SIZE + RECORD_HEADER_BYTES - 1, _SIZE + RECORD_HEADER_BYTES + 1])
def test_an_object_of_another_size_is_not_read_and_is_removed(
    server: S3Server, daemon: TierDaemon, stored: ObjectMemory, prefix: str, size: int
) -> None:
    (where,) = [each for each in server.objects() if each.startswith(prefix)]
    server.write(where, (server.read(where) + b"x")[:size])
    assert daemon.get(name(1), daemon.l1.object(_SIZE), _SECONDS) is TierOutcome.CORRUPT
    assert not of_prefix(server.objects(), prefix)


def test_a_get_that_has_ended_writes_no_part_to_l1(daemon: TierDaemon, proxy: IllProxy, stored: ObjectMemory) -> None:
    """The second part arrives once the get was cancelled and its memory is another object's."""
    held, release = threading.Event(), threading.Event()

    def hold(body: bytes) -> bytes:
        held.set()
        release.wait(_SECONDS)
        return body

    proxy.change = always(hold)
    read = daemon.l1.object(_SIZE)
    ticket = daemon.tier.get(name(1), read, within(_SECONDS))
    try:
        assert held.wait(_SECONDS)
        daemon.tier.cancel(ticket)
        assert daemon.ends.of(ticket).outcome is TierOutcome.CANCELLED
        ctypes.memset(daemon.l1.region.address, 0, daemon.l1.region.size)
    finally:
        release.set()
    daemon.tier.close(within(_SECONDS))  # the lanes' threads have ended
    assert not any(daemon.l1.read(read)[0])


# ---- puts ------------------------------------------------------------------------------------------


def of_prefix(names: list[str], prefix: str) -> list[str]:
    return [each for each in names if each.startswith(prefix)]


def test_a_large_object_is_put_in_parts_at_once_and_is_not_there_before_all_are(
    server: S3Server, daemon: TierDaemon, proxy: IllProxy, prefix: str
) -> None:
    others = threading.Barrier(4)
    steps: list[str] = []
    early: list[str] = []

    def together(step: str, body: bytes) -> bytes:
        steps.append(step)
        if step.startswith("part"):
            others.wait(_SECONDS)
        if step == "complete":
            early.extend(of_prefix(server.objects(), prefix))
        return body

    proxy.upload = together
    memory, read = daemon.l1.object(_UPLOADED), daemon.l1.object(_UPLOADED)
    assert daemon.put(name(1), memory, _SECONDS) is TierOutcome.DONE
    assert sorted(steps) == ["begin", "complete", "part 1", "part 2", "part 3", "part 4"]
    assert not early
    assert daemon.get(name(1), read, _SECONDS) is TierOutcome.DONE
    assert daemon.l1.read(read) == daemon.l1.read(memory)


@pytest.mark.parametrize("first", [None, 500], ids=["cut", "refused"])
def test_a_part_whose_first_put_fails_is_put_again(daemon: TierDaemon, proxy: IllProxy, first: int | None) -> None:
    failures = [first]
    proxy.upload = lambda step, body: failures.pop() if step == "part 2" and failures else body
    memory, read = daemon.l1.object(_UPLOADED), daemon.l1.object(_UPLOADED)
    assert daemon.put(name(1), memory, _SECONDS) is TierOutcome.DONE
    assert not failures
    assert daemon.get(name(1), read, _SECONDS) is TierOutcome.DONE
    assert daemon.l1.read(read) == daemon.l1.read(memory)


@pytest.mark.parametrize(("ill", "status"), [("begin", 403), ("part 2", 500), ("part 4", 403), ("complete", 500)])
def test_an_upload_with_a_refused_step_leaves_nothing(
    server: S3Server, daemon: TierDaemon, proxy: IllProxy, prefix: str, ill: str, status: int
) -> None:
    proxy.upload = lambda step, body: status if step == ill else body
    assert daemon.put(name(1), daemon.l1.object(_UPLOADED), _SECONDS) is TierOutcome.UNAVAILABLE
    assert not of_prefix(server.objects() + server.uploads(), prefix)
    assert daemon.get(name(1), daemon.l1.object(_UPLOADED), _SECONDS) is TierOutcome.MISSING


def test_a_part_that_stands_still_ends_its_put_at_the_deadline_and_later_its_upload(
    server: S3Server, proxy: IllProxy, prefix: str, make_daemon_of: MakeDaemon
) -> None:
    url = server.url_of(prefix, "timeout=5s").replace(str(server.port), str(proxy.port))
    daemon = make_daemon_of(url, pages=4 * _UPLOADED // PAGE)
    release = threading.Event()
    proxy.upload = lambda step, body: body if step != "part 2" or release.wait(_SECONDS) else None
    try:
        assert daemon.put(name(1), daemon.l1.object(_UPLOADED), 0.5) is TierOutcome.TIMEOUT
        wait_until(lambda: not of_prefix(server.uploads(), prefix), _SECONDS)
        assert not of_prefix(server.objects(), prefix)
    finally:
        release.set()


def test_a_part_that_stands_still_once_is_put_again_before_the_deadline(
    server: S3Server, proxy: IllProxy, prefix: str, make_daemon_of: MakeDaemon
) -> None:
    url = server.url_of(prefix, "timeout=16s").replace(str(server.port), str(proxy.port))  # the put has 18 s
    daemon = make_daemon_of(url, pages=4 * _UPLOADED // PAGE)
    release, stops = threading.Event(), [True]
    proxy.upload = lambda step, body: (
        None if step == "part 2" and stops and stops.pop() and release.wait(_SECONDS) else body
    )
    try:
        assert daemon.put(name(1), daemon.l1.object(_UPLOADED), _SECONDS) is TierOutcome.DONE
    finally:
        release.set()


def test_a_put_has_no_more_than_four_connections(client: StoreClient, proxy: IllProxy) -> None:
    four, fifth, lock = threading.Barrier(4), threading.Event(), threading.Lock()
    parts: list[str] = []
    busy = [0, 0]  # now, most

    def together(step: str, body: bytes) -> bytes:
        if not step.startswith("part"):
            return body
        with lock:
            parts.append(step)
            busy[:] = busy[0] + 1, max(busy[1], busy[0] + 1)
            is_early = len(parts) <= 4
        if is_early:
            four.wait(_SECONDS)
            fifth.wait(2)  # that it would come in
        else:
            fifth.set()
        with lock:
            busy[0] -= 1
        return body

    proxy.upload = together
    assert client.put([_LONG_NAME], [memoryview(bytearray(40 << 20))]) == [None]
    assert (len(parts), busy) == (8, [0, 4])


def error_of(client: StoreClient) -> StoreError:
    (error,) = client.put([_LONG_NAME], [memoryview(bytearray(_UPLOADED))])
    assert error is not None
    return error


@pytest.mark.parametrize("status", [403, 500])
def test_the_reason_of_a_refused_part_is_shown(client: StoreClient, proxy: IllProxy, status: int) -> None:
    proxy.upload = lambda step, body: status if step == "part 2" else body
    error = error_of(client)
    assert f"status code: {status}" in str(error)
    assert "<Code>Refused</Code>" in str(error)


def test_a_refused_abort_is_shown_as_what_hides_the_error_of_the_put(client: StoreClient, proxy: IllProxy) -> None:
    proxy.upload = lambda step, body: {"part 2": 507, "abort": 403}.get(step, body)
    error = error_of(client)
    assert type(error) is StoreRefused
    assert "does the key have AbortMultipartUpload?" in str(error)


def test_a_store_without_uploads_in_parts_gets_large_objects_whole_and_is_not_asked_again(
    server: S3Server, client: StoreClient, proxy: IllProxy, prefix: str
) -> None:
    steps: list[str] = []
    proxy.upload = lambda step, body: steps.append(step) or 501
    value = bytearray(_UPLOADED)
    value[-1] = 1
    assert client.put([f"{prefix}/1"], [memoryview(value)]) == [None]
    assert server.read(f"{prefix}/1") == value
    assert set(steps) == {"begin"}
    steps.clear()
    assert client.put([f"{prefix}/2"], [memoryview(value)]) == [None]
    assert server.read(f"{prefix}/2") == value
    assert not steps


def test_an_object_that_was_put_with_a_flipped_part_is_not_read(
    server: S3Server, daemon: TierDaemon, proxy: IllProxy, prefix: str
) -> None:
    proxy.upload = lambda step, body: body[:-1] + bytes([body[-1] ^ 1]) if step == "part 2" else body
    assert daemon.put(name(1), daemon.l1.object(_UPLOADED), _SECONDS) is TierOutcome.DONE
    assert daemon.get(name(1), daemon.l1.object(_UPLOADED), _SECONDS) is TierOutcome.CORRUPT
    assert not of_prefix(server.objects(), prefix)
