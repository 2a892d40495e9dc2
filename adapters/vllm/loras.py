"""LoRAs of an engine's requests: their files as of the first request, and whether these have changed.

A LoRA is the files that its name and path had at its first request. vLLM reads them again on request, or when it had evicted the
LoRA, but keeps its own blocks and their hashes. So once the files were replaced, it is unknown with which of them a block was
computed. Requests with that name and path then run without cache. New files at a new path are a new LoRA. Before vLLM 0.31, whose
hashes have only the name, they need a new name too.

No LoRA is forgotten: its replaced files would then count as a new LoRA, and vLLM's old blocks would be stored under that name. So
the number is bounded instead: requests of LoRAs beyond the first `MOST_LORAS` run without cache.

Files may be on a slow file system, so a thread looks at them. The scheduler's thread does so only at a LoRA's first request. KV
is loaded after a look that began after the request's arrival. A store is sent after a look that began when the KV had been
computed. A look that finds the stamps of the first request proves that the files were the same in between, so KV of replaced
files is never shared.

Owns: the LoRAs, and the threads that read and look at files. Refuses to know: requests, keys, the text of a variant.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from kvserver.adapters.common.weights import NoWeights, stamps_of
from kvserver.adapters.vllm.identity import lora_fingerprint
from kvserver.adapters.vllm.support import vllm_version

log = logging.getLogger("vllm.kvserver")

MOST_LORAS = 1 << 14  # in one incarnation of an engine: half a KiB or so each
_HASHES_PATHS = (0, 31)  # vLLM's block hashes have a LoRA's path beside its name from then on


@dataclass(slots=True)
class Lora:
    request: Any  # vLLM's LoRARequest, the first one
    stamps: bytes  # of its files at its first request
    looked_at: float  # when the last look that found these began
    fingerprint: str | None = None  # None: not known, so it is shared with no other engine
    is_read: bool = False
    is_replaced: bool = False
    awaits_look: bool = False


class Loras:
    """LoRAs of one engine.

    `whole_digests`: the fingerprint covers every byte of the files. A thread reads them, for it takes about a second for each
    gigabyte. Until then the LoRA's requests run without cache.
    """

    def __init__(self, whole_digests: bool, counters: Counter[str]) -> None:
        self._whole_digests = whole_digests
        self._counters = counters
        self._loras: dict[tuple[str, str], Lora] = {}  # by name and path, as vLLM's block hashes have them
        self._full = False
        self._readings = _Errands("kvserver-lora-files", self._read)
        self._looks = _Errands("kvserver-lora-looks", self._look)

    def of(self, lora: Any) -> Lora | None:
        """The request's LoRA; None if its requests run without cache.

        Reasons: its files are not read yet, they were replaced, or there are too many LoRAs.
        """
        known = self._known(lora)
        if known is None:
            known = self._add(lora)
        if known is not None and known.is_replaced:
            self._counters["replaced_lora_requests"] += 1
            return None
        return known if known is not None and known.is_read else None

    def are_same_since(self, lora: Any, moment: float) -> bool | None:
        """True if the files are those of the first request, by a look that began at `moment` or later. None: a look is awaited."""
        known = self._known(lora)
        if known is None or known.is_replaced:
            self._counters["replaced_lora_requests"] += known is not None
            return False
        if known.looked_at >= moment:
            return True
        if not known.awaits_look:
            known.awaits_look = True
            self._looks.put(known)
        return None

    def _known(self, lora: Any) -> Lora | None:
        known = self._loras.get(_name(lora))
        if known is not None and known.request.lora_path != lora.lora_path:
            self._replace(known)
        return known

    def _add(self, lora: Any) -> Lora | None:
        if len(self._loras) >= MOST_LORAS:
            self._counters["unknown_lora_requests"] += 1
            if not self._full:
                log.warning("this engine has had %d LoRAs: further ones run without kvserver", MOST_LORAS)
            self._full = True
            return None
        now = time.monotonic()
        added = Lora(lora, _stamps(lora), now)
        self._loras[_name(lora)] = added
        if self._whole_digests and Path(lora.lora_path).expanduser().is_dir():
            self._readings.put(added)
        else:
            self._read(added)
        return added

    def _read(self, known: Lora) -> None:
        name = known.request.lora_name
        try:
            known.fingerprint = lora_fingerprint(known.request, self._whole_digests)
        except (NoWeights, OSError) as error:
            log.debug("LoRA %r", name, exc_info=error)
        except Exception:  # a bug, which must not end the thread
            log.exception("kvserver: a fault while LoRA %r was read", name)
        if known.fingerprint is None:
            log.warning("kvserver: KV with LoRA %r is shared with no other engine: no files to read", name)
        self._look(known)  # what was read are the files of the first request
        known.is_read = True

    def _look(self, known: Lora) -> None:
        known.awaits_look = False  # what is asked from here on needs another look
        began = time.monotonic()
        try:
            if _stamps(known.request) == known.stamps:
                known.looked_at = began
            else:
                self._replace(known)
        except OSError as error:  # nothing is known: who waits for the look gives up at a deadline
            log.debug("LoRA %r", known.request.lora_name, exc_info=error)

    def _replace(self, known: Lora) -> None:
        if not known.is_replaced:
            log.warning(
                "the files of LoRA %r were replaced: its requests run without kvserver; give new files a new %s",
                known.request.lora_name,
                "path" if vllm_version() >= _HASHES_PATHS else "name",
            )
        known.is_replaced = True


class _Errands:
    """Queue of LoRAs for one thread, which begins with the first."""

    def __init__(self, name: str, act: Callable[[Lora], None]) -> None:
        self._name, self._act = name, act
        self._queue: SimpleQueue[Lora] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, lora: Lora) -> None:
        self._queue.put(lora)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                self._act(self._queue.get())
            except Exception:  # a bug, which must not end the thread: who waits gives up at a deadline
                log.exception("kvserver: a fault while the files of a LoRA were looked at")


def _name(lora: Any) -> tuple[str, str]:
    return lora.lora_name, lora.lora_path if vllm_version() >= _HASHES_PATHS else ""


def _stamps(lora: Any) -> bytes:
    found = stamps_of(Path(lora.lora_path).expanduser())
    return hashlib.blake2b(repr(found).encode(), digest_size=16).digest()
