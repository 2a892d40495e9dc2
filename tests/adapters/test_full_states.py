"""When a full state is sent: to a new session, where something was lost, and no oftener than needed."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from peer import Peer
from replay import Churn, Replay
from support.daemon import wait_until

from kvserver.adapters.common.notices import EngineNames, Notices, Prompt
from kvserver.adapters.vllm.blockpool import MAX_RECORDS
from kvserver.protocol import Error, ErrorCode, ReportBlockAllocations


class Talk:
    """Reports about a pool over a channel to a socket that only listens, or does not yet."""

    def __init__(self, folder: Path, churn: Churn, listens: bool = True) -> None:
        self._peer = Peer(folder)
        self.counters = self._peer.counters
        self.notices = Notices(self._peer.dispatcher, EngineNames("i", "n", "m"), churn.hook, self.counters)
        self.messages: list[ReportBlockAllocations] = []
        self._frames: list[Any] = []  # of these
        self.channel = self._peer.link.connect()
        if listens:
            self.listen()

    def listen(self) -> None:
        self._peer.listen()
        assert self.channel.wait_writable(5)

    def reconnect(self) -> None:
        self.channel = self._peer.link.connect()
        assert self.channel.wait_writable(5)

    def end_pass(self) -> None:
        """And wait until what was sent has been received."""
        self.notices.send_blocks()
        while len(self.messages) < self.counters["notices"]:
            received = self._peer.receive(5)
            assert received is not None
            self._frames.append(received[0])
            self.messages.append(received[1])

    def wait_received(self, count: int) -> None:
        """End passes until so many messages have arrived."""
        wait_until(lambda: self.end_pass() or len(self.messages) >= count, 5)
        assert len(self.messages) == count

    def refuse(self, which: int) -> None:
        """One of the messages."""
        self._peer.reply(self._frames[which], Error(code=ErrorCode.REPORT_GAP.value, message="of the test"))

    def close(self) -> None:
        self._peer.close()


@pytest.fixture
def make_talk():
    folder, talks = Path(tempfile.mkdtemp(prefix="kvs-")), []

    def make(churn: Churn, **options: object) -> Talk:
        place = folder / str(len(talks))  # its own: one that must not be received must find no other's socket
        place.mkdir()
        talks.append(Talk(place, churn, **options))
        return talks[-1]

    yield make
    for talk in talks:
        talk.close()
    shutil.rmtree(folder)


def test_a_refusal_from_before_the_full_state_requests_no_other(make_talk):
    """Reports that were on their way when the daemon lost track are refused one by one."""
    churn = Churn()
    talk = make_talk(churn)
    for family in range(3):
        churn.begin(family, 1)
        talk.end_pass()
    talk.refuse(1)
    talk.wait_received(4)
    talk.refuse(2)
    churn.begin(3, 1)
    talk.end_pass()
    assert [report.payload.full for report in talk.messages] == [True, False, False, True, False]


def test_a_daemon_that_always_wants_another_full_state_gets_few(make_talk):
    churn = Churn(blocks=20_000)
    churn.pool.get_new_blocks(15_000)
    churn.drain_records()
    talk = make_talk(churn)
    for _ in range(100):
        churn.pool.get_new_blocks(1)
        talk.end_pass()
        talk.refuse(-1)
    assert talk.counters["full_states"] < 50
    assert all(report.payload.full for report in talk.messages), "it could make nothing of other reports"


def test_what_could_not_be_sent_is_in_a_full_state(make_talk):
    churn = Churn()
    talk = make_talk(churn, listens=False)
    churn.begin(1, 2)
    talk.end_pass()
    churn.begin(2, 2)
    assert talk.counters["unsent"] == 1
    talk.listen()
    talk.wait_received(1)
    (report,) = talk.messages
    assert (report.sequence, report.payload.full) == (1, True)
    assert churn.agrees(Replay().apply_reports([report]))


def test_an_end_that_could_not_be_sent_leaves_a_gap_that_a_full_state_closes(make_talk, monkeypatch):
    churn = Churn()
    talk = make_talk(churn)
    churn.begin(1, 1)
    talk.end_pass()
    with monkeypatch.context() as full:
        full.setattr(talk.channel, "send", lambda message: None)
        talk.notices.end_request("r", 0.0, Prompt())
    talk.wait_received(2)
    assert [(report.sequence, report.payload.full) for report in talk.messages] == [(0, True), (2, True)]


def test_records_that_were_dropped_lead_to_a_full_state(make_talk):
    """The breaker was open so long that no pass drained them."""
    churn = Churn()
    talk = make_talk(churn)
    blocks = churn.begin(1, 30)
    talk.end_pass()
    for _ in range(MAX_RECORDS // len(blocks)):  # each turn has two records of each
        churn.pool.touch(blocks)
        churn.pool.free_blocks(blocks)
    assert churn.hook.lost
    talk.wait_received(2)
    assert [report.payload.full for report in talk.messages] == [True, True]
    assert churn.agrees(Replay().apply_reports(talk.messages))


def test_a_full_state_of_several_messages_is_full_once(make_talk):
    churn = Churn(blocks=MAX_RECORDS)
    churn.pool.get_new_blocks(MAX_RECORDS - 1)
    churn.drain_records()
    talk = make_talk(churn)
    talk.end_pass()
    assert [(report.sequence, report.payload.full) for report in talk.messages] == [(0, True), (1, False)]
    assert all(len(report.payload.records) <= 4 * MAX_RECORDS for report in talk.messages)
    assert churn.agrees(Replay().apply_reports(talk.messages))


def test_a_pass_in_which_nothing_happened_reports_nothing(make_talk):
    churn = Churn()
    talk = make_talk(churn)
    talk.end_pass()
    talk.end_pass()
    (report,) = talk.messages
    assert report.payload.full
    assert report.payload.records == b"", "the pool was never used"


def test_each_session_begins_with_a_full_state(make_talk):
    churn = Churn()
    talk = make_talk(churn)
    for family in range(3):
        churn.begin(family, 2)
        talk.end_pass()
    talk.reconnect()
    talk.wait_received(4)
    assert [report.payload.full for report in talk.messages] == [True, False, False, True]
    assert [report.sequence for report in talk.messages] == [0, 1, 2, 3]
