"""The settings, each declared once: type, bound, default and consequence; and what the values of some of them mean.

Owns: `Settings`, from which flags, `/config` and the tables of the documentation are made. Refuses to know: where values
come from (`config`), what the settings do.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

KiB, MiB, GiB = 1 << 10, 1 << 20, 1 << 30
MIN_L1_BYTES = 64 * KiB  # one page of any size
_UNITS = {"": 1, "b": 1, "kib": KiB, "mib": MiB, "gib": GiB, "tib": 1 << 40, "kb": 10**3, "mb": 10**6, "gb": 10**9}


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """How one daemon runs. Field `l1_size` is flag `--l1-size`, `KVSERVER_L1_SIZE`, TOML key `l1-size`."""

    endpoint: Annotated[
        str,
        Meta(
            description="ZMQ endpoint of the engines, ipc:///path or tcp:// on a loopback address. Without one it is "
            "kvserver/kvserver.sock under $XDG_RUNTIME_DIR, or under a folder in /tmp named by the user's id."
        ),
    ] = ""
    http_host: Annotated[
        str,
        Meta(
            description="Address of the status pages and metrics. At one that is no loopback address only /metrics, /livez and /readyz "
            "answer without --http-token-file."
        ),
    ] = "127.0.0.1"
    http_port: Annotated[int, Meta(ge=0, le=65535, description="Port of the same; 0 takes any free one.")] = 8080
    http_token_file: Annotated[
        str,
        Meta(
            description="File with a token of 16 characters or more, read at the start, that others may not read (chmod 600). All pages "
            "but /metrics, /livez and /readyz then need it as Authorization: Bearer, on loopback addresses too, which every user of "
            "the machine reaches."
        ),
    ] = ""
    l1_size: Annotated[
        str,
        Meta(description='CPU memory for KV, as "20GiB" or "auto" (a quarter of what is free). Refused if not free.'),
    ] = "auto"
    l1_huge_pages: Annotated[
        Literal["auto", "transparent", "2MiB", "1GiB", "off"],
        Meta(
            description="Pages of L1. auto takes explicit huge pages if the operator reserved enough, else transparent ones; a "
            "size takes explicit ones or refuses to start (then --l1-size auto is all that are free); off takes small ones."
        ),
    ] = "auto"
    l1_numa: Annotated[
        str,
        Meta(
            pattern=r"^(auto|off|bind:\d{1,4})$",
            description="Memory nodes of L1. auto interleaves over all nodes with processors, unless the daemon was started "
            "under a memory policy (numactl); bind:N stays on node N, for engines that run there; off leaves it to the kernel.",
        ),
    ] = "auto"
    gpus: Annotated[
        str,
        Meta(
            description="GPUs whose memory engines may register. auto: all that the driver shows, each with a CUDA context (about "
            '0.5 GiB of its memory) from its first engine on; UUIDs, as `nvidia-smi -L` shows them, "GPU-...,GPU-...": only those, '
            "ready and L1 pinned at the start; none: CPU memory only."
        ),
    ] = "auto"
    pin: Annotated[
        Literal["auto", "off"],
        Meta(
            description="Pinning of L1 for GPUs. auto pins it in the background as soon as a GPU is in use: it cannot be swapped "
            "then; off never does, and copies to and from GPUs are slower."
        ),
    ] = "auto"
    chunk_tokens: Annotated[
        int, Meta(ge=1, le=65536, description="Tokens per chunk: smaller finds shorter prefixes, larger is cheaper.")
    ] = 256
    eviction_policy: Annotated[
        Literal["lru"], Meta(description="Who leaves L1 first: lru is the least recently used.")
    ] = "lru"
    lease_seconds: Annotated[
        float, Meta(gt=0, description="How long a lookup protects its chunks when its request never ends.")
    ] = 60.0
    copy_threads: Annotated[int, Meta(ge=1, le=256, description="Native threads that copy blocks.")] = 2
    max_message_bytes: Annotated[
        int,
        Meta(
            ge=4096, le=GiB, description="Larger messages get an error; sixteen times larger ones end the connection."
        ),
    ] = 4 * MiB
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Meta(description="Least severe log line.")] = (
        "info"
    )
    log_format: Annotated[Literal["text", "json"], Meta(description="One line of text or of JSON per event.")] = "text"
    metrics_sample_rate: Annotated[
        float,
        Meta(
            gt=0,
            le=1,
            description="Share of the lives of blocks and chunks whose times are in the histograms. Counters and gauges are exact "
            "at any rate; 1 remembers every life, which takes memory and time.",
        ),
    ] = 0.01
    otlp_endpoint: Annotated[
        str,
        Meta(
            description="OpenTelemetry collector that metrics and traces are sent to: http(s)://host:port for OTLP over HTTP (to "
            "/v1/metrics and /v1/traces below it), grpc://host:port for gRPC without TLS. Headers come from "
            "OTEL_EXPORTER_OTLP_HEADERS. Without one nothing is sent; with one the daemon takes some 12 MB more (gRPC: 25) and "
            "starts a quarter of a second later."
        ),
    ] = ""
    otlp_interval_seconds: Annotated[
        float, Meta(ge=0.1, le=3600, description="Pause between two sendings of the metrics.")
    ] = 15.0
    trace_sample_rate: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="Share of requests that are traced, of those whose engine was sent no trace context: where there is one, "
            "it decides.",
        ),
    ] = 0.01
    kv_events: Annotated[
        Literal["auto", "on"],
        Meta(
            description="Whether engines are asked to say with each store what is in its blocks (hashes and token ids: 6 to 8 bytes a "
            "token). auto: if the KV events are published, written or observed here. on: also where only engines publish them, each "
            "with its own --kv-events-config."
        ),
    ] = "auto"
    kv_events_endpoint: Annotated[
        str,
        Meta(
            description="Address where the KV events of L1 and L2 are published (ZMQ PUB, as vLLM's): tcp://host:port or ipc:///path. "
            "Each further stream (model and form of hashes) gets a port two higher, or a path with -1, -2 ...; {model} and {form} in a "
            "path give it its own. Events carry token ids: whoever can connect can read prompts. Without one nothing is published."
        ),
    ] = ""
    kv_events_replay_endpoint: Annotated[
        str, Meta(description="Address where subscribers ask for batches that they missed (ZMQ ROUTER); likewise.")
    ] = ""
    kv_events_topic: Annotated[
        str,
        Meta(
            max_length=256,
            description="Topic of the events; {model} and {form} stand for the stream's. With {instance}, as in llm-d's "
            "kv@{instance}@{model}, each attached instance has a topic of its own, with what it can read.",
        ),
    ] = "kv-events"
    kv_events_format: Annotated[
        Literal["map", "array"],
        Meta(description="Events as maps, as vLLM since 0.26, or as arrays for older consumers."),
    ] = "map"
    kv_events_buffer: Annotated[
        str, Meta(description="Memory of each stream for batches that may be asked for again; at most 10,000 are kept.")
    ] = "64MiB"
    kv_events_memory: Annotated[
        str,
        Meta(
            description="Memory for what is in chunks that are announced: about 6 bytes a token. Chunks beyond it are counted and not "
            "announced."
        ),
    ] = "256MiB"
    kv_events_file: Annotated[
        str, Meta(description="File that KV events are appended to, one JSON object a line, for people and tests.")
    ] = ""
    kv_event_observers: Annotated[
        str,
        Meta(
            description="Installed observers of KV events (entry points kvserver.kv_event_observers) to load: all, none or names joined "
            "by commas. What kvserver brings itself has its own settings and stays."
        ),
    ] = "all"
    engine_kv_events: Annotated[
        Literal["auto", "off"],
        Meta(
            description="auto reads what engines hold in their own memory from their KV events, where vLLM's --kv-events-config "
            "publishes them on a loopback address or as ipc."
        ),
    ] = "auto"
    kv_index_size: Annotated[
        str, Meta(description="Memory for the index behind POST /kv/match; blocks beyond it are counted and not found.")
    ] = "256MiB"


def parse_size(text: str) -> int:
    """Bytes of "20GiB", "512 MiB", "1gb" or "4096". ValueError says what is accepted."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(f"{text!r} is no size; write for example 20GiB, 512MiB or a number of bytes")
    return int(Decimal(match[1]) * _UNITS[match[2].lower()])


def parse_gpus(text: str) -> tuple[str, ...]:
    """The UUIDs in `gpus`, none of "auto" and "none". ValueError says what is accepted."""
    if text in ("auto", "none"):
        return ()
    found = [part.strip() for part in text.split(",")]
    for uuid in found:
        if not re.fullmatch(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", uuid):
            raise ValueError(
                f"{uuid!r} is no UUID of a GPU; write auto, none or what `nvidia-smi -L` shows, joined by commas"
            )
        if found.count(uuid) > 1:
            raise ValueError(f"{uuid} stands there twice")
    return tuple(found)


@dataclass(frozen=True)
class OtlpEndpoint:
    """A collector. `base` is a URL without a slash at its end, or for gRPC host:port."""

    grpc: bool
    base: str


def parse_otlp_endpoint(text: str) -> OtlpEndpoint | None:
    """None of "". ValueError says what is accepted."""
    if not text:
        return None
    parts = urlsplit(text)
    port, rest = parts.port, parts.path.strip("/")  # the port raises ValueError
    if parts.scheme in ("http", "https") and parts.hostname and not parts.query and not parts.fragment:
        return OtlpEndpoint(False, text.rstrip("/"))
    if parts.scheme == "grpc" and parts.hostname and port and not rest and not parts.query:
        return OtlpEndpoint(True, parts.netloc)
    raise ValueError("write http://host:port, https://host:port or grpc://host:port")


def parse_events_endpoint(text: str) -> tuple[str, int] | None:
    """(address without port, port) of tcp, (address, 0) of ipc, None of "". ValueError says what is accepted."""
    if not text:
        return None
    if match := re.fullmatch(r"(tcp://(?:\*|\[[0-9a-fA-F:.]+\]|[\w.-]+)):(\d{1,5})", text):
        if int(match[2]) > 65535:
            raise ValueError(f"{match[2]} is no port")
        return match[1], int(match[2])
    if re.fullmatch(r"ipc://[^@].*[^/]", text):
        check_placeholders(text, "model", "form")
        return text, 0
    raise ValueError("write tcp://host:port or ipc:///path of a file that may become a socket")


def check_placeholders(text: str, *known: str) -> None:
    """ValueError if it has others in braces."""
    for name in re.findall(r"\{([^{}]*)\}", text):
        if name not in known:
            raise ValueError(f"there is no {{{name}}}; there are {', '.join('{' + name + '}' for name in known)}")
