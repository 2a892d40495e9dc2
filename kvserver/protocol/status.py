"""Status of a daemon: `/status`, `/metrics` and `kvserver status` read one `DaemonStatus`.

The names of the fields are the keys of `/status`, which are public. All have defaults, and unknown keys are ignored: the status
of an older or newer daemon is read as far as both know it. A status does not change once it is made.

Owns: the structs. Refuses to know: which part fills them in.
"""

from __future__ import annotations

from msgspec import UNSET, Struct, UnsetType

from kvserver.protocol.kv_status import KVEventsStatus
from kvserver.protocol.measurements import Buckets

# ---- L1 and GPUs --------------------------------------------------------------------------------


class ModelStatus(Struct, frozen=True, kw_only=True):
    """Status of one model, or of one tenant with a share, in L1. A model's has no chunks of tenants."""

    used_bytes: int = 0
    chunks: int = 0
    evictions: int = 0
    never_loaded: int = 0  # of the evicted chunks
    share_bytes: int = 0  # of L1 that are kept for it; 0: it has no share


class L1Status(Struct, frozen=True, kw_only=True):
    size_bytes: int = 0
    used_bytes: int = 0
    pinned_bytes: int = 0
    page_bytes: int = 0
    chunks: int = 0  # also those that stores are filling
    tail_blocks: int = 0  # single blocks, which are not among the chunks
    evictions: int = 0  # of chunks
    evicted_bytes: int = 0
    cleared_chunks: int = 0
    models: dict[str, ModelStatus] = {}
    tenants: dict[str, ModelStatus] = {}  # with a share
    other_tenants: int = 0  # stores and fills that named a tenant without a share
    policy: str = ""
    huge_pages: str = ""
    numa_nodes: list[int] = []


class PinsStatus(Struct, frozen=True, kw_only=True):
    """Pins (`/cache/pins`) of the daemon: prompts whose chunks L1 keeps."""

    pins: int = 0
    bytes: int = 0  # of L1 that they protect
    most_bytes: int = 0  # that they may protect: --pin-share
    deferred_chunks: int = 0  # that are in L2 alone
    requests: dict[str, int] = {}  # by outcome
    ended: dict[str, int] = {}  # by reason
    passed_over: int = 0  # evictions that took another chunk than a pinned one


class PrefetchesStatus(Struct, frozen=True, kw_only=True):
    """Prefetches (`/cache/prefetches`) of the daemon: prompts that L1 gets from L2 before a request."""

    prefetches: int = 0
    requests: dict[str, int] = {}  # by outcome


class DirectionStatus(Struct, frozen=True):
    """Bytes that a GPU copied in one direction."""

    dma_bytes: int = 0
    staged_bytes: int = 0
    unpinned_bytes: int = 0  # between the GPU and parts of L1 that were not pinned
    staging_bytes: int = 0  # the staging buffer's size


class GpuStatus(Struct, frozen=True, kw_only=True):
    device: str = ""  # its UUID
    lost: str = ""  # why nothing can be copied any more
    mapped_bytes: int = 0
    store: DirectionStatus = DirectionStatus()
    load: DirectionStatus = DirectionStatus()


# ---- instances ----------------------------------------------------------------------------------


class WorkerStatus(Struct, frozen=True, kw_only=True):
    rank: int = 0
    device: str = ""  # "cpu", or the UUID of a GPU
    mapped_bytes: int = 0
    planes: int = 0
    block_bytes: int = 0
    num_blocks: int = 0
    pid: int = 0
    tickets: int = 0
    last_seen_seconds: float = 0.0


class RequestCounts(Struct):
    """Counts of an instance's requests and their results.

    Tokens are those of whole chunks, and of single blocks that were found behind them. The daemon counts in such a struct; a
    status has a copy.
    """

    lookups: int = 0
    hits: int = 0
    lookup_tokens: int = 0
    hit_tokens: int = 0
    stores: int = 0
    loads: int = 0
    fills: int = 0  # lookups for which objects were read from L2
    filled_tokens: int = 0  # of chunks that became READY in L1 from L2
    fills_not_begun: int = (
        0  # lookups for which nothing was read from L2, since that was expected to take longer than to compute
    )
    fills_slower: int = 0  # fills that took longer than expected
    fill_seconds: float = 0.0  # from a fill's plan to its end
    store_waits: int = 0  # lookups that waited for a store of an engine
    handed_over_tokens: int = 0  # that lookups were promised by the engines that computed the prompts
    late_handovers: int = 0  # lookups that had to be answered while a promised store still ran
    lost_handovers: int = 0  # lookups for which a promised store did not arrive, or failed
    stored_chunks: int = 0
    loaded_chunks: int = 0
    stored_bytes: int = 0
    loaded_bytes: int = 0
    store_nanos: int = 0
    load_nanos: int = 0
    failed_stores: int = 0
    failed_loads: int = 0
    avoided_chunks: int = 0  # that stores did not copy: L1 had them or was receiving them
    starved_chunks: int = 0  # that stores did not copy: L1 had no space
    saved_tokens: int = 0  # whose KV was loaded instead of computed
    saved_seconds: float = 0.0  # that the engine would have needed for them, at the speed it reported
    ended_requests: int = 0
    sequence_gaps: int = 0
    engine_preemptions: int = 0  # these: growth of the totals that the engine reported
    engine_prompt_tokens: int = 0
    engine_generation_tokens: int = 0
    engine_prefix_queries: int = 0
    engine_prefix_hits: int = 0
    engine_external_queries: int = 0
    engine_external_hits: int = 0
    engine_finished_requests: int = 0


class RequestsStatus(RequestCounts, frozen=True, kw_only=True):  # type: ignore[misc]  # msgspec lets a struct freeze
    missed_tokens: dict[str, int] = {}  # of lookups, by the reason why each chunk was missing
    # These follow from the ends of requests. None: the engine does not report them.
    saved_seconds: float | None = 0.0  # type: ignore[assignment]
    ended_requests: int | None = 0  # type: ignore[assignment]
    prompt_tokens: dict[str, int] | None = {}  # by source
    request_loads: dict[str, int] | None = {}  # by outcome
    prefill_seconds_gained: float | None = 0.0
    prefill_seconds_lost: float | None = 0.0
    hit_ratio: Buckets | None = Buckets()
    store_duration: dict[str, Buckets] = {}  # by phase
    load_duration: dict[str, Buckets] = {}


class L0Status(Struct, frozen=True, kw_only=True):
    """Blocks of an instance, from its reports."""

    allocations: int = 0
    reuses: int = 0
    shared_accesses: int = 0
    evictions: int = 0
    recycled: int = 0
    cleared: int = 0
    lost: int = 0
    report_gaps: int = 0
    records: int = 0
    active_blocks: int = 0
    released_blocks: int = 0
    tracked_blocks: int = 0
    unsure: bool = False  # out of sync: reports were lost and the full state has not arrived
    refused_reports: int = 0  # of the other source
    source: str = ""  # "exact" or "reported", once it has reported


class EngineStatus(Struct, frozen=True, kw_only=True):
    """The stats of an engine, as it reported them; totals count from its start."""

    running: int = 0
    waiting: int = 0
    deferred: int = 0
    kv_cache_usage: float = 0.0
    preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    external_queries: int = 0
    external_hits: int = 0
    finished_requests: int = 0
    prompt_tokens_per_second: float = 0.0
    generation_tokens_per_second: float = 0.0
    interval_seconds: float = 0.0  # between two reports
    age_seconds: float = 0.0
    stale: bool = False


class InstanceStatus(Struct, frozen=True, kw_only=True):
    instance_id: str = ""
    model_name: str = ""
    engine: str = ""  # "vllm", "sglang"; empty if its adapter does not report it
    engine_version: str = ""
    kv_role: str = ""  # vLLM's: "kv_both", "kv_producer", "kv_consumer"
    namespace: str = ""  # empty until all ranks are registered and agree
    private: str = ""  # why it shares KV with no other instance
    machine_only: str = ""  # why its KV goes to no tier of L2 that machines share
    world_size: int = 0
    l0_source: str = ""
    l0: L0Status | None = L0Status()  # None: the engine does not report its blocks
    unreported: list[str] = []  # "requests", "blocks", "stats", "sessions": what the engine does not report
    workers: list[WorkerStatus] = []
    prefill_tokens_per_second: float = 0.0
    block_tokens: int = 0
    chunk_tokens: int = 0
    requests: RequestsStatus = RequestsStatus()
    load: EngineStatus | None = None  # if it has reported


class DepartedStatus(Struct, frozen=True, kw_only=True):
    """Disconnected instance: what its series in /metrics still show."""

    instance_id: str = ""
    model_name: str = ""
    gone_seconds: float = 0.0
    requests: RequestsStatus = RequestsStatus()


class RefusedEngineStatus(Struct, frozen=True, kw_only=True):
    """An engine that runs without cache, since its registration was refused in the last 30 seconds."""

    instance_id: str = ""
    model_name: str = ""
    engine: str = ""  # as of InstanceStatus
    engine_version: str = ""
    code: str = ""  # of the error
    message: str = ""
    age_seconds: float = 0.0  # of the last refusal


class ConnectsStatus(Struct, frozen=True, kw_only=True):
    """Connects and disconnects of instances from the daemon's start on."""

    connected: int = 0
    disconnected: dict[str, int] = {}  # by reason


# ---- the daemon ---------------------------------------------------------------------------------


class TotalsStatus(Struct, frozen=True, kw_only=True):
    """Totals of all instances, also of those that are forgotten."""

    lookup_tokens: int = 0
    hit_tokens: int = 0
    stored_bytes: int = 0
    loaded_bytes: int = 0
    failed_stores: int = 0
    failed_loads: int = 0
    prompt_tokens: dict[str, int] = {}  # by source
    errors: int = 0
    undelivered_replies: int = 0
    fill_seconds: float = 0.0  # that requests waited for reads from L2


class AccountingStatus(Struct, frozen=True, kw_only=True):
    """Accounts that must balance: with nothing in flight and no worker connected all but the pages and audits are 0."""

    tickets: int = 0
    pins: int = 0
    leases: int = 0
    mappings: int = 0
    attachments: int = 0
    free_pages: int = 0
    used_pages: int = 0
    audits: int = 0
    unbalanced: int = 0  # audits that failed


class SubscriberStatus(Struct, frozen=True, kw_only=True):
    name: str = ""
    errors: int = 0
    last_error: str = ""


class EventsStatus(Struct, frozen=True, kw_only=True):
    """The daemon's own events, from the loop to its subscribers."""

    published: int = 0
    dropped: int = 0
    published_types: dict[str, int] = {}
    dropped_types: dict[str, int] = {}
    queue_depth: int = 0
    lag_seconds: float = 0.0
    waits: Buckets = Buckets()
    subscribers: list[SubscriberStatus] = []


class ExplainStatus(Struct, frozen=True, kw_only=True):
    requests: int = 0  # remembered
    most_requests: int = 0
    bytes: int = 0
    oldest_seconds: float = 0.0


class RecordingStatus(Struct, frozen=True, kw_only=True):
    file: str = ""
    requests: int = 0  # written by this daemon
    lost: int = 0  # requests that are missing in the file, because they were too many for a queue
    bytes: int = 0  # of the file
    full: bool = False  # the file has --record-size: nothing more is written
    failure: str = ""  # why nothing more is written


class SentStatus(Struct, frozen=True, kw_only=True):
    """Items that an exporter sent to its collector."""

    sent: int = 0
    failed: int = 0
    last_error: str = ""


class OtlpStatus(SentStatus, frozen=True, kw_only=True):
    endpoint: str = ""


class TracesStatus(SentStatus, frozen=True, kw_only=True):
    requests: int = 0  # traced and not ended
    forgotten: int = 0
    spans: int = 0


class PagesStatus(Struct, frozen=True, kw_only=True):
    """The connections to the status pages."""

    connections: int = 0
    answering: int = 0
    refused: dict[str, int] = {}  # by reason


class TierStatus(Struct, frozen=True, kw_only=True):
    """Status of a tier of L2. What a tier does not count is 0; the fields after `breaks` are of the queue in front of it."""

    name: str = ""
    kind: str = ""
    url: str = ""  # without secrets
    state: str = ""  # opening, ready, read_only, unavailable or closed
    failure: str = ""
    required: bool = False
    size_bytes: int = 0  # 0: the storage itself has the bound
    used_bytes: int = 0
    objects: int = 0  # that are known
    hits: int = 0  # gets that ended as DONE
    misses: int = 0
    corrupt: int = 0
    timeouts: int = 0
    errors: int = 0  # of the system, of the server
    written_objects: int = 0
    written_bytes: int = 0
    read_bytes: int = 0
    evictions: int = 0
    full: int = 0  # puts that found no space
    breaker: str = "closed"  # closed, open or probing
    breaks: int = 0  # how often the breaker opened
    queue_objects: int = 0
    queue_bytes: int = 0
    dropped: dict[str, int] = {}  # objects that were not written, by reason
    read_bytes_per_second: float = 0.0  # of fills lately; 0 if it is not known
    read_only: bool = False  # as its URL has it
    read_timeouts: int = 0  # of `timeouts`, and
    read_errors: int = 0  # of `errors`: those of gets


class WhatIfSize(Struct, frozen=True, kw_only=True):
    size: str = ""  # times L1, or "unlimited"
    size_bytes: int | None = None
    would_hit_tokens: int = 0


class WhatIfEngine(Struct, frozen=True, kw_only=True):
    """The part that engines of one kind have: "vllm", "sglang"; "" of adapters that state none."""

    engine: str = ""
    looked_up_tokens: int = 0
    sizes: list[WhatIfSize] = []


class WhatIfStatus(Struct, frozen=True, kw_only=True):
    """Tokens of lookups that L1 alone, of other sizes and evicting by `policy`, would have found; beside them what L2 gave."""

    policy: str = "lru"
    looked_up_tokens: int = 0
    sizes: list[WhatIfSize] = []
    # At most a second old:
    listed_chunks: int = 0
    sample_rate: float = 1.0  # of the chunks used longest ago
    memory_bytes: int = 0
    l2_tokens: int = 0  # that engines loaded after reads from L2 for their request; no hit of L1
    fill_seconds: float = 0.0  # that requests waited for these reads
    advice: str = ""  # on the size of L1, beside what L2 gives
    engines: list[WhatIfEngine] = []  # by kind


class DaemonStatus(Struct, frozen=True, kw_only=True):
    """Status of the whole daemon. A field that is UNSET is no key of `/status`.

    The loop's thread makes it, but for `stale_seconds` and `http`.
    """

    version: str = ""
    boot_id: str = ""
    uptime_seconds: float = 0.0
    ready: bool = False
    protocol_version: int = 0
    loop_lag_seconds: float = 0.0  # the longest turn of late
    loop_turns: Buckets = Buckets()
    metrics_sample_rate: float = 0.0
    l1: L1Status = L1Status()
    what_if: WhatIfStatus = WhatIfStatus()
    l2: list[TierStatus] = []
    gpus: list[GpuStatus] = []
    instances: list[InstanceStatus] = []
    connects: ConnectsStatus = ConnectsStatus()
    departed: list[DepartedStatus] = []
    totals: TotalsStatus = TotalsStatus()
    events: EventsStatus = EventsStatus()
    kv_events: KVEventsStatus = KVEventsStatus()
    explain: ExplainStatus = ExplainStatus()
    otlp: OtlpStatus | UnsetType = UNSET  # with a collector
    traces: TracesStatus | UnsetType = UNSET
    recording: RecordingStatus | UnsetType = UNSET  # with --record
    books: AccountingStatus = AccountingStatus()
    refused_registrations: dict[str, int] = {}  # by error code
    refused_engines: list[RefusedEngineStatus] = []
    stale_seconds: float | UnsetType = UNSET  # since the loop's last turn, if it does not answer
    http: PagesStatus | UnsetType = UNSET
    serving: str = ""  # on, stores-off or off
    not_ready: str = ""  # why it should receive no traffic, as /readyz states it
    pins: PinsStatus = PinsStatus()
    prefetches: PrefetchesStatus = PrefetchesStatus()
