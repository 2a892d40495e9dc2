"""A request in words: the sentence that states why tokens were computed, and what would change that.

Owns: the sentences, one for each reason and outcome. Refuses to know: how the facts are found (`explain_facts`).
"""

from __future__ import annotations

from kvserver.cache import MissReason
from kvserver.telemetry.explain_facts import OUTCOMES, Facts

_FIELDS_NAMED = 3  # in a sentence; the rest is counted

_ADVICE = {
    MissReason.EVICTED: "L1 is too small for what comes back: a larger --l1-size keeps chunks longer, engines that get the same prompts"
    " again (a router) need less of it. kvserver_l1_chunk_idle_before_evict_seconds shows how long chunks stay.",
    MissReason.PINNED_OUT: "Pins keep other prompts in L1: GET /cache/pins lists them. Fewer or shorter pins, a smaller --pin-share, or a larger --l1-size"
    " leave room for this one.",
    MissReason.NO_BOUNDARY: "Windows and states are kept at some boundaries only: the ends of prompts and requests, where prompts part, and every"
    " --boundary-interval tokens. A smaller interval keeps more of them.",
    MissReason.FILLING: "Requests with one prefix arrived together, before the first one's store had ended. Rare ones cost little; of many,"
    " send one ahead of the others.",
    MissReason.IN_L2: "L1 lacked it and a tier of L2 has it: it was read if the engine could wait for that (kvserver.fill_timeout_ms), and computed if not.",
    MissReason.SLOW_L2: "L1 lacked it and a tier of L2 has it, but the engine was expected to compute it sooner than the tier is read at"
    " present: kvserver_l2_read_bytes_per_second and kvserver_engine_prefill_tokens_per_second are compared. A faster tier, or a larger"
    " --l1-size, helps.",
    MissReason.OTHER_NAMESPACE: "Engines share KV only where all that changes it agrees. Start them with the same values of the fields"
    " named here; `kvserver status` shows why an engine is private.",
    MissReason.UNAVAILABLE: "`kvserver status` shows which ranks are registered; the engine's log states why one is not. A lost device needs"
    " a restart of the daemon.",
    MissReason.NEVER_STORED: "If the prompt was computed here before, compare its tokens from the first missing one on: a time, a name or"
    " an id early in a prompt changes all chunks after it. A restart of the daemon and POST /cache/clear empty L1; engines whose block"
    " hashes start differently (xxhash without one PYTHONHASHSEED for all) share nothing.",
    MissReason.PARTIAL_CHUNK: "Only whole chunks are stored for this engine. --tails on stores the blocks behind them, of models with full"
    " attention alone; a smaller --chunk-tokens leaves fewer tokens over.",
}
_SERVING_OFF = "An operator has switched the daemon's serving off: POST /config/serving?value=on ends that."
_FAILURES = {
    "late": "The load's deadline had passed before it began: copies wait for each other. More --copy-threads, or a longer"
    " kvserver.load_timeout_ms.",
    "not_found": "A chunk was evicted or cleared between lookup and load: a longer --lease-seconds, or a shorter"
    " kvserver.lookup_age_ms, where requests wait long.",
    "cancelled": "The engine gave up (kvserver.load_timeout_ms, of SGLang kvserver.load_wait_ms and kvserver.load_share, or its client disconnected),"
    " or the engine is ending.",
    "memory_lost": "The memory that the engine had registered is no longer there: look for the engine's end in its log.",
    "device_lost": "The device that copies has failed: restart the daemon, and see its log.",
}
_FAILED = "See the logs of the daemon and of the engine's worker of that rank; vllm:kvserver_load_failures_total counts such loads."
_NOT_LOADED = {
    "lookup_timeout": "The answer to the lookup took longer than kvserver.lookup_timeout_ms. Is the daemon, or the machine, overloaded?"
    " kvserver_rpc_seconds and kvserver_loop_lag_seconds show how long it takes.",
    "computes_all": "The engine must compute the whole prompt, as for prompt logprobs.",
    "whole_prompts_only": "This engine can only decode behind a hit, not prefill, so it loads whole prompts or nothing.",
    "load_failed": "A load of the same chunks had failed less than 10 seconds before, so they were computed.",
    "request_limit": "The request itself wants nothing loaded: kvserver.max_load_tokens or kvserver.tiers in its kv_transfer_params.",
    "save_only": "The engine's kv_role is kv_producer: it stores KV and loads none.",
    "not_used": "vLLM took the hit back: it has those tokens itself or from another connector, or, with enable_return_routed_experts, it"
    " has no experts of tokens that another engine computed.",
    "embeddings_dtype": "The prompt is embeddings, and this engine was given some of another dtype than its model's: vLLM hashes their raw"
    " bytes, so one dtype's KV would be taken for the other's. Cast the tensors to the model's dtype, and restart the engine.",
    "weights_changed": "The weights may have changed between the lookup and the load (kvserver.on_prefix_reset).",
}
_WHY_NOT_LOADED = (
    "The engine does not report why. The answer may have taken longer than kvserver.lookup_timeout_ms, the weights may have"
    " changed meanwhile, the request may have ended first, or this engine cannot prefill behind a hit: see the engine's log and"
    " vllm:kvserver_lookup_timeouts_total."
)
_NO_LOOKUP = (
    "The engine does not look up prompts that it must compute whole (prompt logprobs), and none while its breaker is open; a lookup"
    " may also have been forgotten, or lost when the events' queue was full (/status, events.dropped)."
)


def verdict(facts: Facts) -> str:
    """Verdict on the request in one sentence."""
    tokens = facts["tokens"]
    if tokens["computed"] is not None:
        share = f"{tokens['computed']:,} of {tokens['prompt']:,} prompt tokens were computed"
    elif facts["waits"]["lookups"]:
        share = f"{tokens['found']:,} of {tokens['prompt']:,} prompt tokens were found in L1"
    else:
        share = "nothing is known of its tokens"
    return f"{share}: {_why(facts)}"


def _why(facts: Facts) -> str:
    outcome, tokens = facts["outcome"], facts["tokens"]
    match outcome:
        case "load_failed":
            rank = next(
                (f" on rank {load['rank']}" for load in facts["loads"] if load["outcome"] == facts["failure"]), ""
            )
            return f"the load of what was found failed{rank} ({facts['failure']})"
        case "not_loaded":
            why = f" ({facts['not_loaded']})" if facts["not_loaded"] else ""
            return f"{tokens['found']:,} tokens were found in L1, and the engine loaded none of them{why}"
    parts = [_missing(facts)] if facts["missing"] is not None else []
    if outcome not in ("partial", "miss") or not parts:
        parts = [OUTCOMES[outcome], *parts]
    return "; ".join(parts)


def _missing(facts: Facts) -> str:
    missing = facts["missing"]
    assert missing is not None
    chunk = f"chunk {missing['chunk']} on"
    match MissReason(missing["reason"]):
        case MissReason.EVICTED | MissReason.PINNED_OUT as reason:
            before = missing["evicted_seconds_before"]
            when = f" {_seconds(before)} before the lookup" if before is not None else ""
            kept = "a larger --l1-size" if reason is MissReason.EVICTED else "L1 without pins"
            return f"{chunk} was evicted{when}; {kept} would have kept it"
        case MissReason.NO_BOUNDARY:
            return f"{chunk} has full attention's KV in L1, but no window or state of a boundary behind it was kept"
        case MissReason.FILLING:
            return f"{chunk} was on its way into L1 at that moment, by the store of another request"
        case MissReason.IN_L2:
            return f"{chunk} was not in L1 but in L2 at the lookup"
        case MissReason.SLOW_L2:
            return f"{chunk} was not in L1 but in L2, and reading it was expected to take longer than computing it"
        case MissReason.OTHER_NAMESPACE:
            return f"{chunk} is in L1 for engines that may not share KV with this one; {_differing(facts)}"
        case MissReason.UNAVAILABLE:
            return f"nothing could be found: {facts['unavailable'] or 'not all ranks of the instance were registered'}"
        case MissReason.NEVER_STORED:
            return f"{chunk} was never stored here, or was cleared, or evicted long ago"
        case MissReason.PARTIAL_CHUNK:
            left = facts["missed_tokens"][MissReason.PARTIAL_CHUNK.value]
            if not facts["tails"]:
                return f"the last {left:,} tokens are no whole chunk of {facts['chunk_tokens']:,}"
            if left < facts["block_tokens"]:
                return f"the last {left:,} tokens are no whole block of {facts['block_tokens']:,}"
            return f"the blocks of the last {left:,} tokens, behind the last whole chunk, were never stored here, or have left L1"


def _differing(facts: Facts) -> str:
    differs = facts["differs"]
    if differs is None or not differs["known"]:
        return "what differs is not remembered"
    named = [f"{f['name']} is {f['here']} here and {f['there']} there" for f in differs["fields"][:_FIELDS_NAMED]]
    more = len(differs["fields"]) + differs["more_fields"] - len(named)
    return ", ".join([*named, *([f"and {more} more fields differ"] if more else [])])


_HANDED_OVER = (
    "Another engine handed this prompt over, and its store did not arrive here in time: see whether it is connected to this daemon, "
    "and its failed and starved stores."
)


def advice(facts: Facts) -> list[str]:
    """Advice for the outcome first, then for each reason why tokens were missed, most tokens first.

    Each states how many of the request's tokens it would have saved at most. Advice that would have saved none is left out, but
    for a load that failed: it cost time.
    """
    found = []
    match facts["outcome"]:
        case "load_failed":
            found.append(_saving(_FAILURES.get(facts["failure"], _FAILED), _not_loaded(facts)))
        case "not_loaded":
            found.append(_saving(_NOT_LOADED.get(facts["not_loaded"], _WHY_NOT_LOADED), _not_loaded(facts)))
        case "no_lookup" if facts["missing"] is None:
            found.append(_NOT_LOADED.get(facts["not_loaded"], _NO_LOOKUP))
    tokens = facts["tokens"]
    if (lost := facts["handed_over"] - max(tokens["found"], (tokens["l0"] or 0) + tokens["l1"] + tokens["l2"])) > 0:
        found.append(_saving(_HANDED_OVER, min(_computed(facts), lost)))
    saved = [
        (MissReason(reason), _saved(facts, MissReason(reason), missed))
        for reason, missed in facts["missed_tokens"].items()
    ]
    saved.sort(key=lambda item: -item[1])
    return [*found, *(_saving(_advice_on(facts, reason), tokens) for reason, tokens in saved if tokens)]


def _advice_on(facts: Facts, reason: MissReason) -> str:
    switched_off = reason is MissReason.UNAVAILABLE and facts["unavailable"].startswith("serving is")
    return _SERVING_OFF if switched_off else _ADVICE[reason]


def _saving(text: str, tokens: int) -> str:
    return f"{text} At most {tokens:,} of this request's tokens would have been saved." if tokens else text


def _computed(facts: Facts) -> int:
    """Tokens that need not have been computed: never the prompt's last one."""
    tokens = facts["tokens"]
    return max(0, (tokens["prompt"] if tokens["computed"] is None else tokens["computed"]) - 1)


def _not_loaded(facts: Facts) -> int:
    tokens = facts["tokens"]
    had = (tokens["l0"] or 0) + tokens["l1"] + tokens["l2"]
    return min(_computed(facts), max(0, tokens["found"] - had))


def _saved(facts: Facts, reason: MissReason, missed: int) -> int:
    if reason is MissReason.PARTIAL_CHUNK:
        # Behind a chunk that was missed no block is found. Single blocks are as small as what is stored can be.
        alone = len(facts["missed_tokens"]) == 1 and not facts["tails"] and facts["block_tokens"]
        missed = missed // facts["block_tokens"] * facts["block_tokens"] if alone else 0
    return min(_computed(facts), missed)


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:,.0f} s"
