"""Pins as an operator sees them: prompts whose KV stays in L1 for a time, which there are, and the end of one.

Owns: what a pin protects, its outcome and the report. Refuses to know: HTTP, how tokens become keys (`routing`), what an eviction passes
over (`cache`). Runs in the loop's thread.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import time
from dataclasses import dataclass

from msgspec import Struct

from kvserver.cache import MOST_NAMES, MOST_PROTECTIONS, Protection, ProtectionEnd, epoch_of, split_keys, tails_of
from kvserver.protocol import KEY_BYTES, Lookup
from kvserver.server.upkeep import Upkeep

log = logging.getLogger(__name__)

MOST_CHUNKS = 1 << 14  # of one pin: one turn of the loop looks at each
_MOST_REPORTED = 256
_MOST_WAIT_SECONDS = 600.0  # of a request's pin, for the first chunk that it stores


@dataclass(frozen=True)
class PinRequest:
    """Request to pin a prompt. `namespace`: of its engines, without a LoRA. `hashes`: of its blocks, each as long as a key."""

    namespace: bytes
    model_name: str
    hashes: bytes
    chunk_blocks: int
    full_groups: tuple[int, ...]  # numbers of the object groups of full attention
    ttl_seconds: float
    owner: str = "operator"
    id: str = ""  # "": one that nothing else has
    tenant: str = ""  # to whom what L1 lacks will belong
    tail: bytes | None = None  # keys of the blocks behind the last chunk, of a request, which stores all that L1 lacks

    def chunk_keys(self, first: int, last: int) -> bytes:
        """The keys of chunks [first, last): the hash of the last block of each."""
        blocks = range(self.chunk_blocks * (first + 1) - 1, len(self.hashes) // KEY_BYTES, self.chunk_blocks)
        return b"".join([self.hashes[at * KEY_BYTES : (at + 1) * KEY_BYTES] for at in blocks[: last - first]])

    def tail_keys(self, chunks: int) -> bytes:
        """The keys of the blocks of the chunk behind so many."""
        if self.tail is not None:
            return self.tail if chunks == self.chunks else b""
        size = self.chunk_blocks * KEY_BYTES
        return self.hashes[chunks * size : (chunks + 1) * size] if self.chunk_blocks > 1 else b""

    @property
    def chunks(self) -> int:
        return len(self.hashes) // KEY_BYTES // self.chunk_blocks


class PinReport(Struct, frozen=True, kw_only=True):
    """Report of one pin. The names of fields are keys of the answers of `/cache/pins`.

    Tokens and bytes are those that L1 protects now. `tiers`: that have what is pinned. `reason` begins with a code.
    """

    id: str = ""
    outcome: str = ""  # of OUTCOMES
    tokens: int = 0
    bytes: int = 0
    tiers: list[str] = []
    expires_at: float | None = None  # seconds since 1970
    ready_in_seconds: float | None = None  # None: not before a request reads the rest from L2
    reason: str = ""
    owner: str = ""
    model_name: str = ""


OUTCOMES = ("accepted", "clipped", "deferred", "rejected", "missing")


class PinsReport(Struct, frozen=True):
    """Pins, those that end first coming first."""

    pins: list[PinReport]
    left_out: int


class Pins:
    def __init__(self, upkeep: Upkeep) -> None:
        self._upkeep = upkeep

    # ---- a new pin ------------------------------------------------------------------------------

    def begin(self, request: PinRequest) -> PinReport:
        return self._counted(self._pin(request))

    def pin_request(self, namespace: bytes, model_name: str, lookup: Lookup) -> None:
        """Pin a request's prompt. What L1 lacks of it is protected once the request has stored it."""
        owner = f"request:{lookup.instance_id}/{lookup.request_id}"
        if (live := self._of(lookup.instance_id, lookup.request_id)) is not None:
            self._upkeep.cache.protections.end(live, ProtectionEnd.REPLACED)
        id = _id_of(lookup.instance_id, lookup.request_id)
        self.begin(
            PinRequest(
                namespace,
                model_name,
                lookup.keys,
                1,
                (),
                lookup.pin_seconds or 0.0,
                owner,
                id,
                lookup.tenant,
                lookup.tail_keys,
            )
        )

    def request_ended(self, instance_id: str, request_id: str) -> None:
        """Wait no longer for what the request stores than its pin lasts."""
        protections = self._upkeep.cache.protections
        if len(protections) and (pin := self._of(instance_id, request_id)) is not None:
            protections.set_deadline(pin, min(pin.deadline, self._upkeep.clock() + pin.seconds))

    def _of(self, instance_id: str, request_id: str) -> Protection | None:
        return self._upkeep.cache.protections.get(_id_of(instance_id, request_id))

    def reject(self, code: str, text: str) -> PinReport:
        """Count a request that names no prompt of one namespace."""
        return self._counted(rejected(code, text))

    def _counted(self, report: PinReport) -> PinReport:
        self._upkeep.cache.protections.requested[report.outcome] += 1
        return report

    def _pin(self, request: PinRequest) -> PinReport:
        cache, pool = self._upkeep.cache, self._upkeep.cache.pool
        if not cache.protections.fraction:
            return rejected("off", "--pin-share is 0")
        if len(cache.protections) >= MOST_PROTECTIONS:
            return rejected("too_many", f"there are {MOST_PROTECTIONS} pins; delete one")
        if request.chunks > MOST_CHUNKS:
            return rejected("too_large", f"the prompt has {request.chunks} chunks, and a pin at most {MOST_CHUNKS}")
        stores = request.tail is not None
        if stores:
            namespace, known = request.namespace, request.chunks
            leading = cache.leading(namespace, request.hashes)
        else:
            namespace, leading, known = self._search(request)
        tail = request.tail if request.tail is not None else request.tail_keys(leading)
        if not known and not stores and not cache.leading(tails_of(namespace), tail):
            text = "not_cached: neither L1 nor a tier of files has its beginning; a prompt of a LoRA must be in L1"
            return PinReport(outcome="missing", reason=text)
        if known + max(request.chunk_blocks, len(tail) // KEY_BYTES) > cache.protections.room_for_names:
            return rejected("too_many", f"pins may name {MOST_NAMES} chunks together; delete some")
        waits = stores and (leading < known or len(tail) > 0)
        seconds = max(request.ttl_seconds, _MOST_WAIT_SECONDS) if waits else request.ttl_seconds
        protection = Protection(
            request.id or secrets.token_hex(8), request.owner, namespace, cache.index.model(request.model_name),
            self._upkeep.clock() + seconds, time.time() + seconds, seconds=request.ttl_seconds if stores else 0.0,
            tenant=cache.index.tenants.get(request.tenant),
        )  # fmt: skip
        keys = request.chunk_keys(0, request.chunks)
        boundary = cache.protect(protection, keys, request.tail_keys, request.chunk_keys(leading, known))
        if cache.protections.get(protection.id) is None:
            bound = cache.protections.bound_of(protection) * pool.page_bytes
            return rejected(
                "no_room",
                f"pins may use {bound} bytes of L1 for this model or tenant, and not even its first chunk fits",
            )
        if boundary == leading and stores and not protection.note:
            id = tails_of(namespace)
            blocks = split_keys(tail[cache.leading(id, tail) * KEY_BYTES :])
            cache.protections.add(protection, [(id, key) for (key,) in blocks])
        if boundary < leading:
            protection.note = f"no_room: {leading - boundary} chunks of L1 do not fit into --pin-share"
        elif known < request.chunks and not protection.note:
            protection.note = f"not_cached: {request.chunks - known} chunks at its end are not there"
        report = self._report(protection)
        level = logging.DEBUG if stores else logging.INFO
        log.log(level, "pin %s: %d tokens, %s %s", protection.id, report.tokens, report.outcome, report.reason)
        return report

    def _search(self, request: PinRequest) -> tuple[bytes, int, int]:
        """The namespace, of the model or of the LoRA that the hashes cover; the chunks that L1 has, and L1 and L2 together."""
        cache, keys = self._upkeep.cache, request.chunk_keys(0, request.chunks)
        epoch, first = epoch_of(request.namespace), keys[:KEY_BYTES]
        of_model = (of for of in cache.index.namespaces() if epoch_of(of.id) == epoch and not of.groups.tails)
        id = next((of.id for of in of_model if first and of.chunks.get(first) is not None), request.namespace)
        leading = cache.leading(id, keys)
        return id, leading, self._known(id, request, leading)

    def _known(self, namespace: bytes, request: PinRequest, leading: int) -> int:
        """The chunks that L1 and local tiers of L2 have together."""
        keys = request.chunk_keys(leading, request.chunks)
        full = request.full_groups
        present = self._upkeep.storage.present(namespace, max(full) + 1, keys) if full else ()
        if not any(present):
            return leading
        in_l2 = [set(split_keys(of_group)) for of_group in present]
        resident = self._upkeep.cache.index.find_chunks(namespace, keys)
        for key, chunk in zip(split_keys(keys), resident, strict=True):
            if not all(key in in_l2[group] or (chunk is not None and chunk.ready >> group & 1) for group in full):
                break
            leading += 1
        return leading

    # ---- those there are ------------------------------------------------------------------------

    def all(self) -> PinsReport:
        protections = sorted(self._upkeep.cache.protections, key=lambda each: each.deadline)
        return PinsReport(
            [self._report(each) for each in protections[:_MOST_REPORTED]], max(0, len(protections) - _MOST_REPORTED)
        )

    def delete(self, id: str) -> PinReport:
        protection = self._upkeep.cache.protections.get(id)
        if protection is None:
            return PinReport(id=id, outcome="missing", reason="unknown: no pin has this id; it ended, or never was")
        report = self._report(protection)
        self._upkeep.cache.protections.end(protection, ProtectionEnd.DELETED)
        log.info("pin %s was deleted", id)
        return PinReport(
            id=id, outcome="accepted", tokens=report.tokens, bytes=report.bytes, tiers=report.tiers,
            owner=report.owner, model_name=report.model_name,
        )  # fmt: skip

    def _report(self, protection: Protection) -> PinReport:
        index, page_bytes, left = self._upkeep.cache.index, self._upkeep.cache.pool.page_bytes, len(protection.wanted)
        return PinReport(
            id=protection.id,
            outcome="deferred" if left else "clipped" if protection.note else "accepted",
            tokens=protection.tokens,
            bytes=protection.pages * page_bytes,
            tiers=["l1"] * bool(protection.protected) + ["l2"] * bool(left and not protection.seconds),
            expires_at=round(protection.expires_at, 3),
            ready_in_seconds=None if left else 0.0,
            reason=_waits(protection, left) if left else protection.note,
            owner=protection.owner,
            model_name=next((name for name, model in index.models.items() if model is protection.model), ""),
        )


def _waits(protection: Protection, left: int) -> str:
    if protection.seconds:
        return f"not_stored: {left} chunks or blocks are protected once the request has stored them"
    if protection.kept:
        return f"kept: L1 lacks {left} chunks after a restart; each is protected once L1 has it again"
    return f"in_l2: {left} chunks are in L2 alone; each is protected once a request reads it"


def _id_of(instance_id: str, request_id: str) -> str:
    return hashlib.blake2b(f"{instance_id}\0{request_id}".encode(), digest_size=8).hexdigest()


def rejected(code: str, text: str) -> PinReport:
    return PinReport(outcome="rejected", reason=f"{code}: {text}")
