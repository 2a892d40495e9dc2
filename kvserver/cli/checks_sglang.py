"""`kvserver doctor --engine URL` of an SGLang server: its arguments state whether it has the linker, the daemon what it uses.

SGLang's own metrics know nothing of a linker. So its `/server_info` is compared with the status of the daemon at the endpoint
of this command. Both may be on any machine and of anything: each answer becomes a finding.

Owns: reading the arguments, and the findings. Refuses to know: HTTP, and engines with metrics of the connector (`checks_engine`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec

from kvserver.cli.checks import Finding, ok, problem, warning
from kvserver.protocol import Status, StatusReply
from kvserver.protocol.client import Client, RequestFailed, has_listener
from kvserver.protocol.status import DaemonStatus, InstanceStatus

SGLANG = "sglang"
_SECONDS = 2.0
_MOST_TEXT = 64
_MODULE = "kvserver.adapters.sglang"
_FLAGS = (
    "--enable-unified-cache-external-linker --unified-cache-external-linker-backend dynamic "
    f"""--unified-cache-external-linker-config '{{"linker": "KVServerLinker", "linker_module_path": "{_MODULE}"}}'"""
)
_LOG = "read the engine's log: a line with `runs without cache` names the reason"


class Arguments(msgspec.Struct):
    """The arguments of SGLang's that matter here, as `/server_info` has them; other keys are ignored."""

    page_size: Any  # every SGLang has these two
    attention_backend: Any
    version: str = ""
    enable_unified_cache_external_linker: bool = False
    unified_cache_external_linker_backend: str | None = None
    unified_cache_external_linker_config: Any = None

    @property
    def linker(self) -> dict[str, Any]:
        """The linker's configuration; empty if it is not kvserver's."""
        config = self.unified_cache_external_linker_config
        if isinstance(config, str):
            config = json.loads(config)
        ours = isinstance(config, dict) and config.get("linker_module_path") == _MODULE
        return config if ours and self.enable_unified_cache_external_linker else {}


def read(text: str) -> Arguments | None:
    """The arguments; None if this is no `/server_info` of SGLang's."""
    try:
        found = msgspec.json.decode(text, type=Arguments)
        return found if isinstance(found.linker, dict) else None
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


def findings_of(arguments: Arguments, endpoint: str) -> Iterator[tuple[str, Finding]]:
    """The findings with the instance of each, or ""; `endpoint` is that of the daemon to ask."""
    kind = f"SGLang {_short(arguments.version)}".strip()
    config = arguments.linker
    if not config:
        yield "", problem(f"{kind} without kvserver's linker", _FLAGS)
        return
    extra = config.get("linker_extra_config")
    settings = extra if isinstance(extra, dict) else {}
    stated = str(settings.get("kvserver.endpoint") or endpoint)
    if stated != endpoint:
        fix = f"kvserver doctor --endpoint {_short(stated)} --engine URL, on the engine's machine"
        yield "", warning(f"{kind} has the linker, with another daemon than {endpoint}", fix)
        return
    try:
        instances = _instances(endpoint)
    except (OSError, RequestFailed, msgspec.MsgspecError, ValueError) as error:
        fix = "kvserver serve, with the endpoint that the engine has; or run this on the engine's machine"
        yield "", problem(f"{kind} has the linker, and no daemon answers at {endpoint}: {error}", fix)
        return
    name = str(settings.get("kvserver.engine_id") or "")
    found = [one for one in instances if one.engine == SGLANG and _is_named(one.instance_id, name)]
    if not found:
        unknown = f"no SGLang {_short(name)!r}" if name else "no SGLang"
        yield "", problem(f"the cache is off: {kind} has the linker, and the daemon knows {unknown}", _LOG)
    for one in found:
        yield one.instance_id, _of_instance(one, kind)


def _of_instance(one: InstanceStatus, kind: str) -> Finding:
    if not one.namespace:
        ranks = f"{len(one.workers)} of {one.world_size} ranks are registered"
        return problem(f"the cache of {kind} is off: {ranks}", _LOG)
    of = one.requests
    numbers = f"the cache of {kind} is on: {of.lookups} lookups, {of.hits} with a hit, {of.loads} loads, {of.failed_loads} failed"
    if one.private:
        return warning(
            f"{numbers}; it shares KV with no other engine: {one.private}",
            "kvserver.on_prefix_reset=keep in linker_extra_config, where a flush never means new weights; adapters/README.md has each reason",
        )
    return ok(numbers)


def _instances(endpoint: str) -> list[InstanceStatus]:
    if not has_listener(endpoint):
        raise OSError("nothing listens")
    with Client(endpoint, timeout=_SECONDS) as client:
        client.hello("doctor")
        answer = client.ask(Status(), StatusReply)
    return msgspec.msgpack.decode(answer.status, type=DaemonStatus).instances


def _is_named(instance_id: str, name: str) -> bool:
    """True if an engine with this `kvserver.engine_id` may have that id; "": any. Replicas append their number."""
    return not name or instance_id == name or instance_id.startswith(f"{name}_dp")


def _short(text: str) -> str:
    return "".join(filter(str.isprintable, text))[:_MOST_TEXT]
