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

from kvserver.cache import (
    MOST_NAMES,
    MOST_OF_REQUESTS,
    MOST_PROTECTIONS,
    Protection,
    ProtectionEnd,
    SessionKey,
    epoch_of,
    split_keys,
    tails_of,
)
from kvserver.protocol import KEY_BYTES, Lookup, salt_digest
from kvserver.server.upkeep import Upkeep
from kvserver.tiering import MOST_PREFETCHES

log = logging.getLogger(__name__)

MOST_CHUNKS = 1 << 14  # of one pin: one turn of the loop looks at each
_MOST_REPORTED = 256
_RESERVED_NAMES = MOST_NAMES // 4  # for operators
_MOST_READ_SECONDS = 600.0  # of an operator's pin, for what only L2 has
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
    session: SessionKey | None = None  # as of a Protection

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


@dataclass(frozen=True)
class SessionPinRequest:
    """Request to pin what only this session used. `model_name`: "" for any, `instance_ids`: one of them has it, or any if empty."""

    session_id: str
    cache_salt: str
    model_name: str
    instance_ids: tuple[str, ...]
    ttl_seconds: float


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
    ready_in_seconds: float | None = None  # None: not known, or not before a request reads the rest from L2
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

    def begin(self, request: PinRequest | SessionPinRequest) -> PinReport:
        return self._counted(self._pin(request) if isinstance(request, PinRequest) else self._pin_session(request))

    def pin_request(self, namespace: bytes, model_name: str, lookup: Lookup) -> None:
        """Pin a request's prompt. What L1 lacks of it is protected once the request has stored it."""
        owner = f"request:{lookup.instance_id}/{lookup.request_id}"
        if (live := self._of(lookup.instance_id, lookup.request_id)) is not None:
            self._upkeep.cache.protections.end(live, ProtectionEnd.REPLACED)
        id = _id_of(lookup.instance_id, lookup.request_id)
        session = of_all_loras(SessionKey(namespace, lookup.session_salt or b"", lookup.session_id or ""))
        self.begin(
            PinRequest(
                namespace, model_name, lookup.keys, 1, (), lookup.pin_seconds or 0.0, owner, id, lookup.tenant, lookup.tail_keys,
                session if session.id else None,
            )
        )  # fmt: skip

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
        cache = self._upkeep.cache
        stores = request.tail is not None
        reserved = _RESERVED_NAMES if stores else 0
        if (refusal := self._refusal(request.chunks, MOST_OF_REQUESTS if stores else MOST_PROTECTIONS)) is not None:
            return refusal
        if stores:
            namespace, known = request.namespace, request.chunks
            leading = cache.leading(namespace, request.hashes)
        else:
            namespace, leading, known = self._search(request)
        tail = request.tail if request.tail is not None else request.tail_keys(leading)
        if not known and not stores and not cache.leading(tails_of(namespace), tail):
            text = "not_cached: neither L1 nor a tier of files has its beginning; a prompt of a LoRA must be in L1"
            return PinReport(outcome="missing", reason=text)
        if known + max(request.chunk_blocks, len(tail) // KEY_BYTES) > cache.protections.room_for_names - reserved:
            return rejected("too_many", f"pins may name {MOST_NAMES - reserved} chunks together; delete some")
        waits = stores and (leading < known or len(tail) > 0)
        seconds = max(request.ttl_seconds, _MOST_WAIT_SECONDS) if waits else request.ttl_seconds
        protection = Protection(
            request.id or secrets.token_hex(8), request.owner, namespace, cache.index.model(request.model_name),
            self._upkeep.clock() + seconds, time.time() + seconds, seconds=request.ttl_seconds if stores else 0.0,
            session=request.session, tenant=cache.index.tenants.get(request.tenant),
        )  # fmt: skip
        keys = request.chunk_keys(0, request.chunks)

        def wanted(pages: int) -> bytes:
            """Keys of what L1 lacks; of what is in L2, as much as will fit, from the first chunk on: reads end in any order."""
            nonlocal known
            if leading < known and not stores and (fits := leading + self._most_chunks(namespace, pages)) < known:
                protection.note = f"no_room: {known - fits} chunks of L2 do not fit into --pin-share"
                known = fits
            return request.chunk_keys(leading, known)

        boundary = cache.protect(protection, keys, request.tail_keys, wanted)
        if boundary == leading and stores and not protection.note and cache.protections.room(protection) > 0:
            id = tails_of(namespace)
            blocks = split_keys(tail[cache.leading(id, tail) * KEY_BYTES :])
            cache.protections.add(protection, [(id, key) for (key,) in blocks])
        if cache.protections.get(protection.id) is None:
            return self._no_room(protection)
        if boundary < leading:
            protection.note = f"no_room: {leading - boundary} chunks of L1 do not fit into --pin-share"
        elif known < request.chunks and not protection.note:
            protection.note = f"not_cached: {request.chunks - known} chunks at its end are not there"
        if protection.wanted and not stores:
            seconds = min(request.ttl_seconds, _MOST_READ_SECONDS)
            self._read(protection, request.chunk_keys(0, known), seconds, request.tenant)
        return self._begun(protection, logging.DEBUG if stores else logging.INFO)

    def _most_chunks(self, namespace: bytes, pages: int) -> int:
        """Number of chunks that so many pages may hold. Without an engine that reads the namespace nothing is read, so all may come."""
        instance = self._upkeep.prefetches.reader(namespace)
        if instance is None:
            return MOST_CHUNKS
        full = [number for number, group in enumerate(instance.any_worker().spec.object_groups) if group.kind == "full"]
        objects = [of for number in full if (of := instance.coverages[number]) is not None]
        of_chunk = sum([self._upkeep.cache.pool.pages_for(of.slot_bytes) * len(of.slots) for of in objects])
        return max(0, pages) // of_chunk if of_chunk else MOST_CHUNKS

    def _read(self, protection: Protection, keys: bytes, seconds: float, tenant: str) -> None:
        """Begin to read what only L2 has, by a prefetch with the pin's id. Without room for one requests read it, or none does."""
        prefetches = self._upkeep.prefetches
        instance = prefetches.reader(protection.namespace)
        if instance is not None and instance.description is not None and len(prefetches.live) < MOST_PREFETCHES:
            of_variant = instance.description.durability
            prefetches.begin(instance, protection.namespace, keys, of_variant, seconds, protection.id, tenant)

    def _pin_session(self, request: SessionPinRequest) -> PinReport:
        """Pin what the session owns in L1 now. Of a model and its LoRAs the session is one."""
        cache, salt = self._upkeep.cache, salt_digest(request.cache_salt)
        keys = [SessionKey(id, salt, request.session_id) for id in self._namespaces(request)]
        sessions = [one for one in map(cache.sessions.session, keys) if one is not None and one.chunks]
        chunks = sum([one.chunks for one in sessions])
        if (refusal := self._refusal(chunks, MOST_PROTECTIONS)) is not None:
            return refusal
        if len({epoch_of(one.key.namespace) for one in sessions}) > 1:
            return rejected("several_namespaces", "engines that share no KV know it: name a model or instance_ids")
        if chunks > cache.protections.room_for_names:
            return rejected("too_many", f"pins may name {MOST_NAMES} chunks together; delete some")
        missing = PinReport(
            outcome="missing", reason="not_cached: L1 has nothing that only a session of this name used"
        )
        if not sessions:
            return missing
        namespace = cache.index.find_namespace(sessions[0].key.namespace)
        assert namespace is not None, "its id is of the index"
        protection = Protection(
            secrets.token_hex(8), "operator", namespace.id, namespace.model, self._upkeep.clock() + request.ttl_seconds,
            time.time() + request.ttl_seconds, session=of_all_loras(sessions[0].key),
        )  # fmt: skip
        if left := sum([cache.protect_session(protection, one) for one in sessions]):
            protection.note = f"no_room: {left} chunks of the session do not fit into --pin-share"
        if not protection.protected:
            return self._no_room(protection) if left else missing
        cache.protections.add(protection, ())
        return self._begun(protection)

    def _namespaces(self, request: SessionPinRequest) -> list[bytes]:
        """Ids of the model's, and the instances', that are meant."""
        index, instances = self._upkeep.cache.index, self._upkeep.workers.instances.by_id
        ids = index.ids_of_model(request.model_name) if request.model_name else index.namespace_ids()
        meant = [instances[id] for id in request.instance_ids if id in instances]
        bases = tuple(filter(None, [each.described_prefix or each.namespace for each in meant]))
        return [id for id in ids if not request.instance_ids or id.startswith(bases)]

    def _refusal(self, chunks: int, most_pins: int) -> PinReport | None:
        protections = self._upkeep.cache.protections
        if not protections.fraction:
            return rejected("off", "--pin-share is 0")
        if len(protections) >= most_pins:
            return rejected("too_many", f"there are {most_pins} pins; delete one")
        if chunks > MOST_CHUNKS:
            return rejected("too_large", f"it has {chunks} chunks, and a pin at most {MOST_CHUNKS}")
        return None

    def _no_room(self, protection: Protection) -> PinReport:
        bound = self._upkeep.cache.protections.bound_of(protection) * self._upkeep.cache.pool.page_bytes
        return rejected(
            "no_room", f"pins may use {bound} bytes of L1 for this model or tenant, and not even the first chunk fits"
        )

    def _begun(self, protection: Protection, level: int = logging.INFO) -> PinReport:
        report = self._report(protection)
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
        reading = self._upkeep.prefetches.live.get(protection.id) if left else None
        reads = reading is not None and reading.reads
        ready_in = reading.ready_in(self._upkeep.clock()) if reading is not None and reads else None if left else 0.0
        return PinReport(
            id=protection.id,
            outcome="deferred" if left else "clipped" if protection.note else "accepted",
            tokens=protection.tokens,
            bytes=protection.pages * page_bytes,
            tiers=["l1"] * bool(protection.protected) + ["l2"] * bool(left and not protection.seconds),
            expires_at=round(protection.expires_at, 3),
            ready_in_seconds=ready_in,
            reason=_waits(protection, left, reads) if left else protection.note,
            owner=protection.owner,
            model_name=next((name for name, model in index.models.items() if model is protection.model), ""),
        )


def _waits(protection: Protection, left: int, reads: bool) -> str:
    if reads:
        return f"reading: {left} chunks are read from L2; each is protected once L1 has it"
    if protection.seconds:
        return f"not_stored: {left} chunks or blocks are protected once the request has stored them"
    if protection.kept:
        return f"kept: L1 lacks {left} chunks after a restart; each is protected once L1 has it again"
    return f"in_l2: {left} chunks are in L2 alone; each is protected once a request reads it"


def of_all_loras(session: SessionKey) -> SessionKey:
    """The name by which pins know it: its namespace is without a LoRA."""
    return session._replace(namespace=epoch_of(session.namespace))


def _id_of(instance_id: str, request_id: str) -> str:
    return hashlib.blake2b(f"{instance_id}\0{request_id}".encode(), digest_size=8).hexdigest()


def rejected(code: str, text: str) -> PinReport:
    return PinReport(outcome="rejected", reason=f"{code}: {text}")
