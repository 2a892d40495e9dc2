"""The settings, each declared once: type, bound, default and consequence; and the parsers of their values.

Owns: `Settings`, from which flags, `/config` and the tables of the documentation are made. Refuses to know: the sources
of values (`sources`), the effect of settings.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta

# Former settings: what applies instead. Given anywhere, they are refused.
REMOVED = {
    "max_message_bytes": "the limit is 4 MiB",
    "otlp_interval_seconds": "set OTEL_METRIC_EXPORT_INTERVAL, in milliseconds, in the environment",
    "trace_sample_rate": "set OTEL_TRACES_SAMPLER=parentbased_traceidratio and OTEL_TRACES_SAMPLER_ARG in the environment",
}
KiB, MiB, GiB = 1 << 10, 1 << 20, 1 << 30
MIN_L1_BYTES = 64 * KiB  # one page of any size
_UNITS = {"": 1, "b": 1, "kib": KiB, "mib": MiB, "gib": GiB, "tib": 1 << 40, "kb": 10**3, "mb": 10**6, "gb": 10**9}


ServingMode = Literal["on", "stores-off", "off"]
SERVING_MODES: tuple[str, ...] = get_args(ServingMode)


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one daemon. Field `l1_size` is flag `--l1-size`, `KVSERVER_L1_SIZE`, TOML key `l1-size`."""

    endpoint: Annotated[
        str,
        Meta(
            description="ZMQ endpoint for engines, ipc:///path or tcp:// on a loopback address. The default is "
            "kvserver/kvserver.sock under $XDG_RUNTIME_DIR, or under a folder in /tmp named by the user's id."
        ),
    ] = ""
    http_host: Annotated[
        str,
        Meta(
            description="Address of the status pages and metrics. On an address that is not loopback only /metrics, "
            "/livez and /readyz answer without --http-token-file."
        ),
    ] = "127.0.0.1"
    http_port: Annotated[
        int, Meta(ge=0, le=65535, description="Port of the status pages and metrics; 0 chooses any free port.")
    ] = 8080
    http_token_file: Annotated[
        str,
        Meta(
            description="File with a token of 16 characters or more, read at the start; other users must not be "
            "able to read it (chmod 600). All pages but /metrics, /livez, /readyz and the shell of the page at /, which has "
            "no data, then require the token as Authorization: Bearer, also on loopback addresses, to which every user of the machine can connect."
        ),
    ] = ""
    history_seconds: Annotated[
        int,
        Meta(
            ge=60,
            le=7 * 86400,
            description="How far the charts of the page at / reach back. Whatever it is, the daemon keeps 720 samples of its "
            "counters (150 KB), taken one every five seconds for an hour, and never more than one a second.",
        ),
    ] = 3600
    l1_size: Annotated[
        str,
        Meta(
            description='CPU memory for KV (L1), as "20GiB" or "auto" (a quarter of the free memory). The daemon '
            "refuses to start if so much is not free."
        ),
    ] = "auto"
    l1_huge_pages: Annotated[
        Literal["auto", "transparent", "2MiB", "1GiB", "off"],
        Meta(
            description="Pages of L1. auto uses explicit huge pages if the operator reserved enough, else "
            "transparent ones. A size uses explicit huge pages of that size or refuses to start (--l1-size auto "
            "then uses all free ones). off uses small pages."
        ),
    ] = "auto"
    l1_numa: Annotated[
        str,
        Meta(
            pattern=r"^(auto|off|bind:\d{1,4})$",
            examples=["auto", "off", "bind:N"],
            description="Memory nodes of L1. auto interleaves over all nodes with processors, unless the daemon was "
            "started under a memory policy (numactl). bind:N keeps L1 on node N, for engines that run there. off "
            "leaves the choice to the kernel.",
        ),
    ] = "auto"
    l1_file: Annotated[
        str,
        Meta(
            description="File on tmpfs or hugetlbfs that is L1's memory, as /dev/shm/kvserver/l1. A daemon that ends by SIGTERM leaves the chunks in it "
            "to the next one, with a description in PATH.state, on hugetlbfs beside the endpoint; after a crash L1 begins empty. The file keeps its memory until it is removed, beyond the limits of a "
            "container that has ended. fdstore: (so, without a path) has systemd keep the memory over a restart of the unit, until its stop. Without a file L1 ends with the daemon."
        ),
    ] = ""
    gpus: Annotated[
        str,
        Meta(
            description="GPUs whose memory engines may register. auto: all GPUs that the driver shows, each with a "
            "CUDA context (about 0.5 GiB of GPU memory) from its first engine on. UUIDs, as `nvidia-smi -L` shows "
            'them, "GPU-...,GPU-...": only these GPUs, and the daemon starts their contexts and the pinning of L1 '
            "at its start. none: CPU memory only."
        ),
    ] = "auto"
    pin: Annotated[
        Literal["auto", "off"],
        Meta(
            description="Pinning of L1 for GPUs. auto pins L1 in the background from the first use of a GPU; pinned "
            "memory cannot be swapped. off never pins L1, and copies to and from GPUs are slower."
        ),
    ] = "auto"
    chunk_tokens: Annotated[
        int,
        Meta(
            ge=1,
            le=65536,
            description="Tokens per chunk. Smaller chunks find shorter prefixes; larger chunks cost less.",
        ),
    ] = 256
    tails: Annotated[
        Literal["on", "off"],
        Meta(
            description="Blocks behind the last full chunk of a prompt or request, of models with full attention alone. With on they are stored one by "
            "one, and a hit ends on a block. With off a hit ends on a chunk: lookups send no second message, and prompts that never come back use "
            "less of L1.",
        ),
    ] = "on"
    boundary_interval: Annotated[
        int,
        Meta(
            ge=0,
            le=1 << 31,
            description="Tokens between boundaries at which windows and states are kept, beside the ends of prompts and requests and where "
            "prompts part. 0: none. Smaller intervals find more of prompts that part for the first time, and use more of L1.",
        ),
    ] = 16384
    eviction_policy: Annotated[
        Literal["lru", "slru"],
        Meta(
            description="Chunk that is evicted from L1 first. With lru it is the least recently used one. With slru it is the least recently used one of "
            "those that were not used again since their store. Use protects at most 40% of the chunks. bench/README.md has what both find of which "
            "requests, and kvserver replay what they find of yours."
        ),
    ] = "slru"
    share: Annotated[
        tuple[str, ...],
        Meta(
            description="Part of L1 that is kept for a model, as MODEL=FRACTION (llama=0.3) with the name under which the engine serves it. For a tenant "
            "(kvserver.tenant) it is tenant:NAME=FRACTION. The flag may be given again, for fractions of at most 1 together. No store of another one leaves "
            "this one with less. What it does not use of its share others may use, until it stores more. A chunk belongs to the tenant that brought it to L1, "
            "if that has a share, else to its model. All without a share have the rest: nothing, if shares of 1 are used."
        ),
    ] = ()
    pin_share: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="Fraction of L1 that pins (POST /cache/pins) may protect from eviction together: of a --share for that model or tenant, of the rest for "
            "all others. 0: there are no pins. What pins protect is missing for all other prompts.",
        ),
    ] = 0.0
    l2: Annotated[
        tuple[str, ...],
        Meta(
            description="Storage behind L1, tiers in the order of preference; the flag may be given again. "
            "file:///folder?size=200GiB is files on a local disk. Further parameters of each: admit=all|reused, "
            "required=true, read_only=true, write_limit=500MB/s, timeout=2s (kvserver/l2/README.md)."
        ),
    ] = ()
    lease_seconds: Annotated[
        float,
        Meta(
            gt=0,
            description="How long a lookup protects the chunks that it found from eviction, if its request never ends.",
        ),
    ] = 60.0
    serving: Annotated[
        ServingMode,
        Meta(
            description="Use of the cache at the start. stores-off: lookups find what L1 and L2 have, and no store is taken. off: lookups also find "
            "nothing. L1 keeps its chunks, and engines need no restart. POST /config/serving changes it until the daemon ends."
        ),
    ] = "on"
    copy_threads: Annotated[
        int, Meta(ge=1, le=256, description="Native threads that copy blocks between L1 and CPU memory of engines.")
    ] = 2
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Meta(description="Level of the least severe log lines that are written."),
    ] = "info"
    log_format: Annotated[
        Literal["text", "json"], Meta(description="Form of log lines: text or JSON, one line each.")
    ] = "text"
    metrics_sample_rate: Annotated[
        float,
        Meta(
            gt=0,
            le=1,
            description="Share of block and chunk lifetimes that the histograms record. Counters and gauges are "
            "exact at any rate; 1 records every lifetime, which costs memory and time.",
        ),
    ] = 0.01
    otlp_endpoint: Annotated[
        str,
        Meta(
            description="OpenTelemetry collector for metrics and traces: http(s)://host:port for OTLP over HTTP (to "
            "/v1/metrics and /v1/traces below it), grpc://host:port for gRPC without TLS, grpcs://host:port with it. The default is "
            "OTEL_EXPORTER_OTLP_ENDPOINT with OTEL_EXPORTER_OTLP_PROTOCOL (http/protobuf or grpc). "
            "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT and _TRACES_ENDPOINT name another URL for one of the two. OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES, "
            "OTEL_EXPORTER_OTLP_HEADERS, _COMPRESSION, _CERTIFICATE, _CLIENT_CERTIFICATE, _CLIENT_KEY and _TIMEOUT (5 seconds if unset), "
            "OTEL_METRIC_EXPORT_INTERVAL (15000 milliseconds if unset) and OTEL_TRACES_SAMPLER apply. Without the last, one request in a hundred is "
            "traced, and those whose trace context is sampled. Without a collector the daemon sends nothing; with one it uses about 12 MB more "
            "(gRPC: 25 MB) and starts 0.25 s later."
        ),
    ] = ""
    record: Annotated[
        str,
        Meta(
            description="File to which the daemon appends a trace of its lookups, for kvserver replay: times, lengths of prompts and a "
            "number for each chunk, equal where chunks are equal, salted anew at each start. No tokens and no keys are written."
        ),
    ] = ""
    record_size: Annotated[
        str,
        Meta(
            description="Most bytes of the file of --record; a request is about 20 bytes a chunk. Then nothing more is written."
        ),
    ] = "256MiB"
    kv_events: Annotated[
        Literal["auto", "on"],
        Meta(
            description="Contents of blocks (hashes and token ids, 6 to 8 bytes a token) that engines send with each store. With auto they are sent if "
            "this daemon publishes, writes or observes KV events. With on also if only engines publish them, each with its own "
            "--kv-events-config."
        ),
    ] = "auto"
    kv_events_endpoint: Annotated[
        str,
        Meta(
            description="Address where the daemon publishes KV events of L1 and L2 (ZMQ PUB, as vLLM's): "
            "tcp://host:port or ipc:///path. Each further stream (model and form of hashes) gets a port two higher, "
            "or a path with -1, -2 ...; {model} and {form} in a path give each stream its own path. Events carry "
            "token ids: every subscriber can read prompts. Without an address nothing is published."
        ),
    ] = ""
    kv_events_replay_endpoint: Annotated[
        str,
        Meta(
            description="Address where subscribers request KV-event batches that they missed (ZMQ ROUTER), in the "
            "form of --kv-events-endpoint."
        ),
    ] = ""
    kv_events_topic: Annotated[
        str,
        Meta(
            max_length=256,
            description="Topic of KV events; empty as vLLM's own default, which vllm-router expects. {model} and {form} "
            "are replaced with the stream's. With {instance}, as in llm-d's kv@{instance}@{model}, each attached "
            "instance has its own topic, with the chunks that it can read.",
        ),
    ] = ""
    kv_events_format: Annotated[
        Literal["map", "array"],
        Meta(description="Form of published KV events: maps, as vLLM since 0.26, or arrays for older consumers."),
    ] = "map"
    kv_events_buffer: Annotated[
        str,
        Meta(
            description="Memory of each KV-event stream for batches that subscribers may request again; at most "
            "10,000 batches are kept."
        ),
    ] = "64MiB"
    kv_events_memory: Annotated[
        str,
        Meta(
            description="Memory for the contents of chunks that KV events announce: about 6 bytes a token, at most half of it "
            "for chunks that only L2 has. Chunks beyond this limit are counted and not announced."
        ),
    ] = "256MiB"
    kv_events_file: Annotated[
        str,
        Meta(description="File to which the daemon appends KV events, one JSON object a line, for people and tests."),
    ] = ""
    kv_event_observers: Annotated[
        str,
        Meta(
            description="Installed observers of KV events (entry points kvserver.kv_event_observers) to load: all, "
            "none or names joined by commas. kvserver's own publisher, file and index have their own settings."
        ),
    ] = "all"
    engine_kv_events: Annotated[
        Literal["auto", "off"],
        Meta(
            description="auto reads the KV events of engines whose --kv-events-config (vLLM) publishes them on a "
            "loopback address or as ipc: they show the blocks in the engines' own memory. off does not."
        ),
    ] = "auto"
    kv_index_size: Annotated[
        str,
        Meta(description="Memory for the index of POST /kv/match; blocks beyond this limit are counted and not found."),
    ] = "256MiB"


def parse_size(text: str) -> int:
    """Bytes of "20GiB", "512 MiB", "1gb" or "4096". ValueError states the accepted forms."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(f"{text!r} is no size; write for example 20GiB, 512MiB or a number of bytes")
    return int(Decimal(match[1]) * _UNITS[match[2].lower()])


def parse_gpus(text: str) -> tuple[str, ...]:
    """The UUIDs in `gpus`; none for "auto" and "none". ValueError states the accepted forms."""
    if text in ("auto", "none"):
        return ()
    found = [part.strip() for part in text.split(",")]
    for uuid in found:
        if not re.fullmatch(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", uuid):
            raise ValueError(
                f"{uuid!r} is no UUID of a GPU; write auto, none or what `nvidia-smi -L` shows, joined by commas"
            )
        if found.count(uuid) > 1:
            raise ValueError(f"{uuid} is listed twice")
    return tuple(found)


def parse_events_endpoint(text: str) -> tuple[str, int] | None:
    """(address without port, port) for tcp, (address, 0) for ipc, None for "". ValueError states the accepted forms."""
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
    """ValueError if `text` has a placeholder in braces that is not `known`."""
    for name in re.findall(r"\{([^{}]*)\}", text):
        if name not in known:
            raise ValueError(
                f"unknown placeholder {{{name}}}; known are {', '.join('{' + name + '}' for name in known)}"
            )
