"""A GPU's stream over CPU memory: what an engine queues happens later, in order, in a thread of its own."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from kvserver.adapters.common.send_queue import DirectSendQueue, OrderedSendQueue, SendQueue
from kvserver.adapters.vllm import KVServerConnector


class LateEvent:
    """As torch.cuda.Event."""

    def __init__(self, gpu: LateGpu) -> None:
        self._gpu = gpu
        self._fired = threading.Event()

    def record(self) -> None:
        if self._gpu.broken == "record":
            raise RuntimeError("the GPU is broken")
        self._gpu.queue(self._fired.set)

    def synchronize(self) -> None:
        self._gpu.waited += 1
        if self._gpu.broken == "synchronize":
            raise RuntimeError("the GPU is broken")
        self._fired.wait()


class LateGpu:
    """Works at once until it is on hold; `pause` is called before each piece of work."""

    def __init__(
        self, on_hold: bool = False, ordered: bool = True, pause: Callable[[], None] = lambda: None, most: int = 40
    ) -> None:
        """`ordered` is False for the control: an adapter that knows nothing of streams. An engine runs ahead by `most` pieces of work."""
        self.broken = ""  # "record" or "synchronize": what raises
        self.waited = 0  # events that a thread began to wait for
        self.errors: list[BaseException] = []
        self._pause = pause
        self._work: deque[Callable[[], None]] = deque()
        self._on_hold = on_hold
        self._most = most
        self._closed = False
        self._changed = threading.Condition()

        class Connector(KVServerConnector):
            def make_send_queue(connector) -> SendQueue:
                return OrderedSendQueue(lambda: LateEvent(self)) if ordered else DirectSendQueue()

        self.connector = Connector
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def queue(self, work: Callable[[], None]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._on_hold or len(self._work) < self._most)
            self._work.append(work)
            self._changed.notify_all()

    def hold(self) -> None:
        with self._changed:
            self._on_hold = True

    def release(self) -> None:
        with self._changed:
            self._on_hold = False
            self._changed.notify_all()

    def finish(self) -> None:
        """Do all that is queued; AssertionError of the first check that failed."""
        self.release()
        with self._changed:
            assert self._changed.wait_for(lambda: not self._work, 20)
        for error in self.errors:
            raise error

    def close(self) -> None:
        self.finish()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or (self._work and not self._on_hold))
                if self._closed:
                    return
                work = self._work[0]
            self._pause()
            try:
                work()
            except AssertionError as error:
                self.errors.append(error)
            with self._changed:
                self._work.popleft()
                self._changed.notify_all()
