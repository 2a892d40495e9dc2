"""The worker read the link's session twice. A session that the link's thread set in between was used with the state words of the
session before: the next copy armed the same word, and one of the two ended by the other's state.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvserver._native import WordPage, pack_blocks
from kvserver.adapters.common.faults import Faults
from kvserver.adapters.common.link import WORDS, Breaker, Session
from kvserver.adapters.common.send_queue import DirectSendQueue
from kvserver.adapters.common.settings import CommonSettings
from kvserver.adapters.common.specs import LoadSpec
from kvserver.adapters.common.steps import StepPlan
from kvserver.adapters.common.worker import WorkerHalf
from kvserver.protocol import PROTOCOL_VERSION, HelloReply
from kvserver.protocol.client import Channel


class Changes:
    """A link with one session after the other: `reads` of it find the first one."""

    def __init__(self, first: Session, then: Session) -> None:
        self.breaker = Breaker(lambda: None)
        self.reads = 1
        self._sessions = first, then

    @property
    def session(self) -> Session:
        self.reads -= 1
        return self._sessions[self.reads < 0]

    def usable(self) -> Session:
        return self.session


class Posts(DirectSendQueue):
    """Keeps of each message the registration that it names, its word, and the registration of the session that sends it."""

    def __init__(self) -> None:
        super().__init__()
        self.posted: list[tuple[int, int]] = []
        self.senders: list[int] = []

    def post(self, message, computed_in=None) -> bool:
        assert self.session is not None
        self.posted.append((message.registration, message.word))
        self.senders.append(self.session.registration)
        return True


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="kvs-"))
    yield path
    shutil.rmtree(path)


@pytest.mark.parametrize("reads", [0, 1, 2, 3, 4])
def test_no_two_copies_of_a_session_have_one_word_whenever_the_link_changes_it(folder: Path, reads: int) -> None:
    hello = HelloReply(PROTOCOL_VERSION, "0", "boot", 64, "", "")
    first, then = (Session(hello, Channel(f"ipc://{folder}/none"), n, WordPage(WORDS)) for n in (1, 2))
    link, queue = Changes(first, then), Posts()
    worker = WorkerHalf(CommonSettings(), queue, Faults(), link=link)  # type: ignore[arg-type]
    link.reads = 2
    worker.start_loads(StepPlan(loads=[LoadSpec(1, "before", "", 4, b"k" * 32, pack_blocks([5]), 0)]))
    link.reads = reads
    for number in (2, 3, 4):
        worker.start_loads(StepPlan(loads=[LoadSpec(number, f"r{number}", "", 4, b"k" * 32, pack_blocks([number]), 0)]))
    assert {registration for registration, _ in queue.posted} == {1, 2}
    assert len(set(queue.posted)) == len(queue.posted)
    assert [registration for registration, _ in queue.posted] == queue.senders
