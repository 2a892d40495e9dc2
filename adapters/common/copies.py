"""A copy in flight, and how the worker may change its state word.

Owns: the worker's side of the state machine in `csrc/copy/state_word.h`. Refuses to know: when a copy is given up, and how its
end is reported.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvserver._native import State
from kvserver.adapters.common.link import Session
from kvserver.adapters.common.specs import LoadSpec, StoreSpec


@dataclass(slots=True)
class Copy:
    """A store or load in flight: its state word in its session's page, its begin, and the time at which the worker stops waiting."""

    spec: StoreSpec | LoadSpec
    session: Session
    word: int
    began: float
    deadline: float
    quarantined: bool = False
    timed_out: bool = False
    given_up: float = math.inf  # when the engine stated that it does not want the copy any more

    def state(self) -> State:
        assert self.session.words is not None
        return self.session.words.state(self.word)

    def wait(self, seconds: float) -> None:
        """Wait until the copy has ended or is cancelled, `seconds` at most. The server may still write after a wait that ended in vain."""
        assert self.session.words is not None
        self.session.words.wait(self.word, seconds)

    def move(self, from_: State, to: State) -> bool:
        assert self.session.words is not None
        return self.session.words.move(self.word, self.spec.copy_id, from_, to)

    @property
    def open(self) -> bool:
        """True while the server copies, or may still begin."""
        return self.state() in (State.PENDING, State.RUNNING) and not self.session.ended.is_set()

    @property
    def writing(self) -> bool:
        """True while the server may be writing the blocks of this load."""
        return self.state() in (State.RUNNING, State.CANCELLING) and not self.session.ended.is_set()

    def cancel(self) -> bool:
        """Cancel the copy; whether there was something to cancel.

        The server never publishes what it copies of a store after that. Of a long store
        it may have published the first chunks, which were whole before. The server
        acknowledges the cancel of a load that runs.
        """
        running = State.CANCELLED if isinstance(self.spec, StoreSpec) else State.CANCELLING
        return self.move(State.PENDING, State.CANCELLED) or self.move(State.RUNNING, running)
