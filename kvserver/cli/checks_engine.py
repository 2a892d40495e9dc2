"""`kvserver doctor --engine URL`: reads a vLLM engine's own metrics, which report whether its cache is on, and why not.

An SGLang server has no such metrics: `checks_sglang` reads what it has.

The URL may be on any machine and of any server: every answer becomes a finding.

Owns: reading the metrics, and the fix for each reason. Refuses to know: the machine and the daemon (`checks` and its kin).
"""

from __future__ import annotations

import queue
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from kvserver.cli import checks_sglang
from kvserver.cli.checks import Finding, ok, problem, warning
from kvserver.config import split_url, without_user

_SECONDS = 10.0
_MOST_BYTES = 32 << 20
_PREFIX = "vllm:kvserver_"
_MANY_LOOKUPS = 20
_TRANSFER = """--kv-transfer-config '{"kv_connector":"KVServerConnector","kv_role":"kv_both"}'"""
# The fix by the reason in vllm:kvserver_without_cache_info; adapters/README.md has the same table.
HELP = {
    "starting": "wait a few seconds and run this again",
    "no_daemon": "kvserver serve, with the endpoint that the engine has; containers must share its folder",
    "no_answer": "kvserver status; then restart the daemon, the engine finds the new one by itself",
    "breaker_open": "kvserver status; then restart the daemon, the engine finds the new one by itself",
    "not_permitted": "run daemon and engine as one user: the socket is its user's alone; root may connect too",
    "foreign_daemon": "remove that folder, or give daemon and engine an endpoint (--endpoint, kvserver.endpoint)",
    "not_registered": "wake the engine if it sleeps; else its log states why a rank does not register",
    "serving_off": "curl -X POST 'http://DAEMON:8080/config/serving?value=on', when the reason for the switch no longer holds",
    "unsupported": "change the setting named in the reason, or run this engine without the connector",
    "cannot_share": "change the setting named in the reason: --shm-size of the container, or how GPU memory is allocated",
    "setup_failed": "see the engine's log: it names the wrong key of kv_connector_extra_config, or the failure",
    "fault": "report the fault in the engine's log, and restart the engine",
    "asleep": "wake the engine",
    "other": "see the engine's log",
    "refused_version_mismatch": "install one version of kvserver: upgrade the daemon first, then the engine",
    "refused_duplicate_instance": "give each engine its own engine_id in --kv-transfer-config",
    "refused_ranks_disagree": "start all ranks of the engine alike; its log and the daemon's name the field",
    "refused_too_large": "kvserver serve with a larger --l1-size, or a smaller --chunk-tokens",
    "refused_bad_memory": "containers of engine and daemon need the same --ipc and --pid; the daemon's log has more",
    "refused_device_lost": "restart the daemon: its GPU is lost",
}
_REFUSED = "see the daemon's log and the engine's: they name what was refused"


@dataclass
class EngineMetrics:
    """Metrics with one value of the label `engine`."""

    connected: float | None = None
    instance_id: str = ""  # the engine's name in kvserver; "" of an older connector
    reasons: list[tuple[str, str]] = field(default_factory=list)  # (reason, detail)
    values: dict[str, float] = field(default_factory=dict)  # by name without prefix, summed over labels

    def value(self, name: str) -> float:
        return self.values.get(name, 0.0)


def engine_findings(url: str, endpoint: str = "") -> Iterator[tuple[str, Finding]]:
    """The findings of the engines at `url`, named by address and engine_id; a server with data parallelism has several engines.

    `endpoint`: of the daemon that is asked about an SGLang.
    """
    name, where = "engine", ""
    try:
        where = address(url)
        name = f"engine {urllib.parse.urlsplit(where).netloc}"
        text = fetch(where)
    except (OSError, ValueError) as error:
        if isinstance(error, urllib.error.HTTPError) and (found := _sglang(where)) is not None:
            yield from _named(name, checks_sglang.findings_of(found, endpoint))
            return
        why = error.reason if type(error) is urllib.error.URLError else error
        fix = "give the address of vLLM's API server: kvserver doctor --engine http://127.0.0.1:8000"
        yield name, problem(f"{without_user(url, True)} cannot be read: {why}", fix)
        return
    try:
        engines, is_vllm = read(text)
    except Exception as error:  # the parser raises anything for what is not metrics
        yield name, problem(f"{where} has no metrics: {error}", "give the address of vLLM's API server")
        return
    if not any(engine.connected is not None for engine in engines.values()):
        if not is_vllm and (arguments := _sglang(where)) is not None:
            yield from _named(name, checks_sglang.findings_of(arguments, endpoint))
            return
        yield name, _without_gauge(where, bool(engines), is_vllm)
        return
    for label, engine in sorted(engines.items()):
        for finding in findings_of(engine):
            yield f"{name} {label}" + (f" ({engine.instance_id})" if engine.instance_id else ""), finding


def _named(name: str, found: Iterator[tuple[str, Finding]]) -> Iterator[tuple[str, Finding]]:
    for instance_id, finding in found:
        yield f"{name} ({instance_id})" if instance_id else name, finding


def _sglang(metrics_url: str) -> checks_sglang.Arguments | None:
    """The arguments of the SGLang that serves these metrics, or none of its own; None if it is no SGLang."""
    try:
        return checks_sglang.read(fetch(metrics_url.removesuffix("/metrics") + "/server_info"))
    except (OSError, ValueError):
        return None


def _without_gauge(where: str, has_connector: bool, is_vllm: bool) -> Finding:
    if has_connector:
        return problem(
            f"{where} has metrics of an older connector, which do not report whether the cache is on",
            "install this version of kvserver in vLLM's environment",
        )
    if is_vllm:
        return problem(
            f"{where} is vLLM without kvserver's metrics: the connector is not configured, or is too old", _TRANSFER
        )
    return problem(
        f"{where} has no metrics of vLLM", "give the address of vLLM's API server, started without --disable-log-stats"
    )


# ---- reading -------------------------------------------------------------------------------------


def address(url: str) -> str:
    """The address of the metrics. ValueError if `url` is not an HTTP address."""
    parts = split_url(url if "://" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("not an http:// address")
    if "@" in parts.netloc:
        raise ValueError("a user and a password are not sent: leave them away")
    path = parts.path.rstrip("/")
    if not path.endswith("/metrics"):
        path = path.removesuffix("/v1") + "/metrics"
    return urllib.parse.urlunsplit((parts.scheme, parts.netloc, path, "", ""))


def fetch(url: str) -> str:
    """The page, with a deadline for all of it and a largest size. OSError or ValueError if it cannot be read."""
    answers: queue.Queue[str | Exception] = queue.Queue()

    def ask() -> None:
        try:
            answers.put(_get(url))
        except Exception as error:
            answers.put(error)

    # In a thread of its own: a server that sends a byte now and then keeps every timeout of a socket from running out.
    threading.Thread(target=ask, daemon=True).start()
    try:
        answer = answers.get(timeout=_SECONDS)
    except queue.Empty:
        raise OSError(f"no complete answer within {_SECONDS:.0f} s") from None
    if isinstance(answer, (OSError, ValueError)):
        raise answer
    if isinstance(answer, Exception):  # of http.client, for what is not HTTP
        raise OSError(f"{type(answer).__name__}: {answer}")
    return answer


def _get(url: str) -> str:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _SameHost)
    with opener.open(url, timeout=_SECONDS) as answer:
        body: bytes = answer.read(_MOST_BYTES + 1)
    if len(body) > _MOST_BYTES:
        raise ValueError(f"more than {_MOST_BYTES >> 20} MiB")
    return body.decode(errors="replace")


class _SameHost(urllib.request.HTTPRedirectHandler):
    """vLLM redirects /metrics to /metrics/; no engine redirects to another host."""

    def redirect_request(
        self, request: urllib.request.Request, answer: Any, code: int, message: str, headers: Any, url: str
    ) -> urllib.request.Request | None:
        here, there = urllib.parse.urlsplit(request.full_url), urllib.parse.urlsplit(url)
        if (here.scheme, here.netloc) != (there.scheme, there.netloc):
            raise urllib.error.URLError(f"it redirects to another host, {there.hostname}")
        return super().redirect_request(request, answer, code, message, headers, url)


def read(text: str) -> tuple[dict[str, EngineMetrics], bool]:
    """(the engines that have metrics of the connector, by their label; whether this is vLLM at all)."""
    engines: dict[str, EngineMetrics] = {}
    is_vllm = False
    for family in text_string_to_metric_families(text):
        is_vllm |= family.name.startswith("vllm:")
        if not family.name.startswith(_PREFIX):
            continue
        for sample in family.samples:
            engine = engines.setdefault(sample.labels.get("engine", ""), EngineMetrics())
            name = sample.name.removeprefix(_PREFIX)
            if name == "connected":
                engine.connected = sample.value
            elif name == "engine_info":
                engine.instance_id = sample.labels.get("instance_id", "")
            elif name == "without_cache_info" and sample.value:
                engine.reasons.append((sample.labels.get("reason", ""), sample.labels.get("detail", "")))
            else:
                engine.values[name] = engine.value(name) + sample.value
    return engines, is_vllm


# ---- judging ------------------------------------------------------------------------------------


def findings_of(engine: EngineMetrics) -> Iterator[Finding]:
    if engine.connected != 1:
        reason, detail = engine.reasons[0] if engine.reasons else ("other", "no reason is reported")
        help_ = HELP.get(reason) or (_REFUSED if reason.startswith("refused_") else HELP["other"])
        yield problem(f"the cache is off ({reason}): {detail or 'see its log'}", help_)
    else:
        yield _used(engine)
    if faults := engine.value("faults_total"):
        yield warning(
            f"{faults:.0f} faults of the connector were kept from the engine",
            "report it: the engine's log has each kind once",
        )
    if blocks := engine.value("quarantined_blocks"):
        yield warning(
            f"{blocks:.0f} blocks are out of use: a load may still write into them",
            "kvserver status: the daemon hangs, or its copies are slow",
        )


def _used(engine: EngineMetrics) -> Finding:
    """The finding of an engine whose cache is on: whether lookups find anything."""
    lookups, hits = engine.value("lookups_total"), engine.value("lookup_hits_total")
    loads, failed = engine.value("load_seconds_count"), engine.value("load_failures_total")
    numbers = f"the cache is on: {lookups:.0f} lookups, {hits:.0f} with a hit, {loads:.0f} loads, {failed:.0f} failed"
    if failed > max(loads, 1):
        return warning(
            f"{numbers}: most loads fail", "raise kvserver.load_timeout_ms; see the engine's log and the daemon's"
        )
    if hits or lookups < _MANY_LOOKUPS:
        return ok(numbers)
    if not engine.value("store_bytes_total"):
        return warning(
            f"{numbers}; nothing was stored either",
            "read the engine's log: its kv_role, or its requests' kv_transfer_params, may store nothing, or its stores fail",
        )
    return warning(
        f"{numbers}; it stores but finds nothing: no prompt began like an earlier one, L1 is too small, or engines do not share",
        "kvserver status shows `private`, evictions and why lookups miss; before vLLM 0.29 set one PYTHONHASHSEED everywhere",
    )
