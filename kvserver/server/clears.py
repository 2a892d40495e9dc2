"""Clears: which KV a request means, who else uses it, and how much it is.

Engines that agree in everything share a namespace, and so do machines through a tier that they share. KV that is cleared for one
of them is cleared for all. So a request that names one instance or model is refused in that case, unless it states that this is
meant.

Owns: the choice of namespaces, and what is reported. Refuses to know: HTTP, how L1 and tiers forget (`upkeep`). Runs in the
loop's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from msgspec import Struct

from kvserver.cache import split_namespace
from kvserver.engines import Instance
from kvserver.protocol import Durability
from kvserver.server.upkeep import Upkeep

MOST_NAMESPACES = 64  # in one turn of the loop: each is looked for among all


@dataclass(frozen=True)
class ClearRequest:
    """Request to clear; it has at most one of the two names. Without a name all KV is meant."""

    instance_id: str = ""
    model_name: str = ""
    shared: bool = False  # also what others use
    dry_run: bool = False  # report only


class TierClear(Struct, frozen=True):
    name: str
    kind: str
    objects: int | None  # that were removed; None where the tier does not know all that it has
    shared: bool = False  # other machines use it, too


class ClearReport(Struct, frozen=True, kw_only=True):
    """Report of what was cleared, or would be. The names of fields are keys of the answer to `POST /cache/clear`."""

    chunks: int  # in L1
    tail_blocks: int  # single blocks in L1
    l2: list[TierClear]
    instances: list[str]  # that the request meant
    models: list[str]
    shared_with: list[str]  # other instances with the same KV, also those that disconnected in the last minutes
    unnamed_l2: list[
        str
    ] = []  # tiers that may have more KV of the model, which is not meant: its engines are not known
    cleared: bool


@dataclass(frozen=True)
class ClearRefusal:
    code: str  # unknown_instance, unknown_model, not_ready, too_many, shared
    message: str
    report: ClearReport | None = None


class Clears:
    def __init__(self, upkeep: Upkeep) -> None:
        self._upkeep = upkeep

    def clear(self, request: ClearRequest, done: Callable[[int, str], None]) -> ClearReport | ClearRefusal:
        """Choose and clear. Nothing of it is found from now on; `done` is called with the chunks of L1 and what failed or "", as by `Upkeep.clear`.

        After a refusal and for a dry run it is not called, and nothing is cleared.
        """
        chosen = self._choose(request)
        if isinstance(chosen, ClearRefusal):
            return chosen
        named, prefixes = chosen
        report = self._report(request, named, prefixes)
        if request.dry_run:
            return report
        shared_tiers = [tier.name for tier in report.l2 if tier.shared]
        if named is not None and not request.shared and (report.shared_with or shared_tiers):
            users = [f"the instances {', '.join(report.shared_with)}"] if report.shared_with else []
            users += [f"other machines, through {', '.join(shared_tiers)}"] if shared_tiers else []
            return ClearRefusal("shared", f"the same KV may be used by {' and by '.join(users)}", report)
        self._clear(prefixes, done)
        return report

    def _clear(self, prefixes: set[bytes], done: Callable[[int, str], None]) -> None:
        left, cleared, failures = len(prefixes), 0, list[str]()

        def one_done(chunks: int, failure: str) -> None:
            nonlocal left, cleared
            left, cleared = left - 1, cleared + chunks
            failures.extend([failure] if failure else [])
            if not left:
                done(cleared, "; ".join(dict.fromkeys(failures)))

        for prefix in prefixes:
            self._upkeep.clear(prefix, one_done)

    # ---- what is meant ------------------------------------------------------------------------

    def _choose(self, request: ClearRequest) -> tuple[list[Instance] | None, set[bytes]] | ClearRefusal:
        """The instances that are meant, None for all, and the prefixes of their namespaces."""
        if request.instance_id:
            return self._of_instance(request.instance_id)
        if request.model_name:
            return self._of_model(request.model_name)
        return None, {b""}

    def _of_instance(self, instance_id: str) -> tuple[list[Instance], set[bytes]] | ClearRefusal:
        named = [instance for instance in self._all() if instance.instance_id == instance_id]
        if not named:
            known = ", ".join(self._upkeep.workers.instances.by_id) or "none"
            return ClearRefusal("unknown_instance", f"no instance {instance_id!r} is known; registered are: {known}")
        prefixes = {instance.last_namespace for instance in named if instance.last_namespace is not None}
        if not prefixes:
            return ClearRefusal("not_ready", f"nothing is stored under its name: {named[0].ranks_text}")
        return named, prefixes

    def _of_model(self, model_name: str) -> tuple[list[Instance], set[bytes]] | ClearRefusal:
        named = [instance for instance in self._all() if instance.model_name == model_name]
        ids = {*self._upkeep.cache.index.ids_of_model(model_name), *self._upkeep.kept_l1.ids_of_model(model_name)}
        prefixes = {split_namespace(id)[0] for id in ids}
        prefixes |= {instance.last_namespace for instance in named if instance.last_namespace is not None}
        if not prefixes:
            known = ", ".join(dict.fromkeys(instance.model_name for instance in self._all())) or "none"
            text = f"no engine of model {model_name!r} is known, nor is KV of it in L1; known are: {known}"
            if tiers := self._unnamed_tiers():
                text += f"; L2 {', '.join(tiers)} may have KV of it, but keeps no names of models: start an engine of it first, or clear all"
            return ClearRefusal("unknown_model", text)
        if len(prefixes) > MOST_NAMESPACES:
            text = f"its KV is in {len(prefixes)} namespaces, of which {MOST_NAMESPACES} can be cleared at once: clear one instance, or all"
            return ClearRefusal("too_many", text)
        return named, prefixes

    def _all(self) -> Iterable[Instance]:
        yield from self._upkeep.workers.instances.by_id.values()
        yield from self._upkeep.workers.instances.departed.values()

    # ---- what it is ---------------------------------------------------------------------------

    def _report(self, request: ClearRequest, named: list[Instance] | None, prefixes: set[bytes]) -> ClearReport:
        users = [one for one in self._all() if named is None or one.last_namespace in prefixes]
        meant = users if named is None else named
        names = {one.instance_id for one in meant}
        chunks, tail_blocks = self._upkeep.cache.index.count_with(tuple(prefixes))
        return ClearReport(
            chunks=chunks,
            tail_blocks=tail_blocks,
            l2=self._tiers_of(meant, prefixes),
            instances=sorted(names),
            models=sorted({one.model_name for one in users} | ({request.model_name} - {""})),
            shared_with=sorted({one.instance_id for one in users} - names),
            unnamed_l2=self._unnamed_tiers() if request.model_name else [],
            cleared=not request.dry_run,
        )

    def _unnamed_tiers(self) -> list[str]:
        """Names of tiers that hold objects of namespaces no known engine created."""
        known = {one.last_namespace for one in self._all() if one.last_namespace is not None}
        known |= {split_namespace(id)[0] for id in self._upkeep.cache.index.namespace_ids()}
        local = {tier.name: tier for tier in self._upkeep.storage.tiers.local}
        return [
            name
            for name in (each.tier.name for each in self._upkeep.storage.tiers.all)
            if name not in local or local[name].count((b"",)) > local[name].count(tuple(known))
        ]

    def _tiers_of(self, meant: list[Instance], prefixes: set[bytes]) -> list[TierClear]:
        local = {tier.name: tier for tier in self._upkeep.storage.tiers.local}
        # Of KV whose engines are not registered it is not known how far it may go.
        everywhere = bool(prefixes - {one.namespace for one in meant}) or any(
            one.durability(Durability.ANYWHERE) is Durability.ANYWHERE for one in meant
        )
        found: list[TierClear] = []
        for each in self._upkeep.storage.tiers.all:
            tier = each.tier
            known = local.get(tier.name)
            objects = known.count(tuple(prefixes)) if known is not None else None
            found.append(TierClear(tier.name, tier.kind, objects, tier.shared and everywhere))
        return found
