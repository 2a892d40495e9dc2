"""Clears of a file tier. A clear ends once its generations are in the folder, durably (`generations`).

Owns: the clears that wait for that, and the writing of the file, one at a time. Refuses to know: what is cleared.
"""

from __future__ import annotations

from kvserver.l2.base import TierOutcome
from kvserver.l2.files import generations
from kvserver.l2.files.folder import Folder
from kvserver.l2.files.generations import FolderGenerations
from kvserver.l2.files.tickets import FileTickets
from kvserver.l2.files.worker import FileWorker


class FileClears:
    """Clears under way. REQUIRES: one thread uses it."""

    def __init__(self, known: FolderGenerations, folder: Folder, worker: FileWorker, tickets: FileTickets) -> None:
        self._generations = known
        self._folder = folder
        self._worker = worker
        self._tickets = tickets
        self._waiting: list[int] = []  # tickets that the next file ends
        self._saving = False
        self._saved = True  # or being saved

    @property
    def durable(self) -> bool:
        """All that was cleared stays so after a crash."""
        return self._saved and not self._saving

    def begin(self, ticket: int) -> None:
        """The generations have changed in memory."""
        if self._folder.read_only_reason:
            self._tickets.end(ticket, TierOutcome.UNAVAILABLE, self._folder.read_only_reason)
            return
        self._waiting.append(ticket)
        self._saved = False
        self.save()

    def save(self) -> None:
        """Write them unless they are being written; then what changed meanwhile is written next."""
        if self._saving or self._saved:
            return
        raw = self._generations.encode()
        tickets, self._waiting = self._waiting, []
        self._saving = self._saved = True

        def saved(_: object, error: Exception | None) -> None:
            self._saving = False
            if error is not None:
                self._tickets.counts.errors += 1
                self._saved = False  # the next save() tries again
            for ticket in tickets:
                outcome = TierOutcome.UNAVAILABLE if error else TierOutcome.DONE
                self._tickets.end(ticket, outcome, str(error or ""))
            if self._waiting:
                self.save()

        self._worker.run(lambda: generations.write(self._folder, raw), saved)
