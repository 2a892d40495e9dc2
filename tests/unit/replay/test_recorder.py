"""What a recording has of a lookup, what it must not have, and what it does when it cannot go on."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.daemon import wait_until
from support.worker import make_keys

from kvserver.cache import LookupOutcome
from kvserver.events import LookupEnded, RequestEnded
from kvserver.protocol import ConfigError
from kvserver.replay import Recorder, read_trace

MS = 1_000_000


def lookup(keys: list[bytes], time_ns: int = 0, namespace: bytes = b"n" * 32, tokens: int = 0) -> LookupEnded:
    outcome = LookupOutcome(len(keys), 0)
    return LookupEnded(time_ns, "engine", "model", "request", 0, b"".join(keys), outcome, 64, namespace, tokens)


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


class Lost:
    """What the bus has dropped."""

    count = 0

    def __call__(self) -> int:
        return self.count


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


@pytest.fixture
def lost() -> Lost:
    return Lost()


@pytest.fixture
def recorder(path: Path, lost: Lost) -> Iterator[Recorder]:
    recorder = Recorder(str(path), 1 << 20, lost)
    yield recorder
    recorder.close()


def test_a_line_has_the_fields_of_a_trace(recorder: Recorder, path: Path) -> None:
    keys = make_keys(3)
    recorder.handle(lookup(keys[:2], 1000 * MS, tokens=150))
    recorder.handle(lookup(keys, 1250 * MS))
    recorder.close()
    first, second = lines(path)
    assert set(first) == {"timestamp", "input_length", "output_length", "hash_ids", "chunk_tokens"}
    assert (first["input_length"], second["input_length"]) == (150, 3 * 64)
    assert (first["output_length"], first["chunk_tokens"]) == (0, 64)
    assert second["timestamp"] - first["timestamp"] == 250  # type: ignore[operator]
    assert first["hash_ids"] == second["hash_ids"][:2]  # type: ignore[index]
    assert len(set(second["hash_ids"])) == 3  # type: ignore[call-overload]


def test_a_key_of_another_namespace_is_another_block(recorder: Recorder, path: Path) -> None:
    keys = make_keys(2)
    recorder.handle(lookup(keys))
    recorder.handle(lookup(keys, namespace=b"o" * 32))
    recorder.close()
    first, second = lines(path)
    assert not set(first["hash_ids"]) & set(second["hash_ids"])  # type: ignore[call-overload]


def test_two_recordings_of_one_lookup_have_no_id_in_common(path: Path, lost: Lost) -> None:
    for _ in range(2):
        recorder = Recorder(str(path), 1 << 20, lost)
        recorder.handle(lookup(make_keys(5, seed="same")))
        recorder.close()
    first, second = lines(path)  # appended
    assert not set(first["hash_ids"]) & set(second["hash_ids"])  # type: ignore[call-overload]


def test_ids_are_exact_in_a_double_and_only_the_owner_may_read_them(recorder: Recorder, path: Path) -> None:
    recorder.handle(lookup(make_keys(500)))
    recorder.close()
    (line,) = lines(path)
    assert all(int(float(id)) == id for id in line["hash_ids"])  # type: ignore[attr-defined]
    assert max(line["hash_ids"]) > 1 << 45  # type: ignore[call-overload]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_only_lookups_of_registered_engines_are_written(recorder: Recorder, path: Path) -> None:
    recorder.handle(lookup(make_keys(1), namespace=b""))
    recorder.handle(RequestEnded(0, "engine", "model", "request"))
    recorder.close()
    assert path.read_bytes() == b""
    assert recorder.status().lost == 0


def test_the_file_never_exceeds_its_size_and_then_ends(path: Path, lost: Lost) -> None:
    path.write_bytes(b"\n" * 500)  # what was there counts
    recorder = Recorder(str(path), 1000, lost)
    for number in range(50):
        recorder.handle(lookup(make_keys(1 + number % 3)))
    recorder.close()
    status = recorder.status()
    assert status.full
    assert 600 < status.bytes == path.stat().st_size <= 1000
    assert len(read_trace(path.open("rb"), "t").requests) == status.requests < 50


def test_requests_that_the_bus_dropped_are_stated_by_the_next_line(recorder: Recorder, lost: Lost, path: Path) -> None:
    for number, dropped in enumerate((0, 3, 3, 5), 1):
        lost.count = dropped
        recorder.handle(lookup(make_keys(1)))
        wait_until(lambda written=number: recorder.status().requests == written, what="the line is written")
    recorder.close()
    assert [line.get("lost", 0) for line in lines(path)] == [0, 3, 0, 2]
    assert read_trace(path.open("rb"), "t").lost == recorder.status().lost == 5


def test_a_disk_that_hangs_loses_requests_and_delays_no_other_subscriber(tmp_path: Path, lost: Lost) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # reads nothing: writes block once the pipe is full
    recorder = Recorder(str(path), 1 << 40, lost)
    event = lookup(make_keys(2000))
    sent = 0
    while not recorder.status().lost:  # returns at once each time
        recorder.handle(event)
        sent += 1
        assert sent < 10_000, "nothing was lost although nothing can be written"
    recorder.handle(lookup(make_keys(1)))
    assert recorder.status().requests < sent
    os.close(reader)  # now writes fail
    wait_until(lambda: recorder.status().failure, what="the failure is stated")
    assert "BrokenPipeError" in recorder.status().failure
    recorder.close()


def test_a_file_that_cannot_be_opened_is_a_bad_setting(tmp_path: Path, lost: Lost) -> None:
    with pytest.raises(ConfigError, match=r"--record .*: Is a directory"):
        Recorder(str(tmp_path), 1000, lost)
