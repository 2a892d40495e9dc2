"""Mutants of `kvserver/telemetry`."""

from __future__ import annotations

from support.mutation import Mutant

BENEFIT = "kvserver/telemetry/benefit.py"
EXPLAIN = "kvserver/telemetry/explain.py"
EXPLAIN_TESTS = ("unit/telemetry/test_explain.py", "daemon/test_explain.py", "daemon/test_explain_requests.py")
WHAT_IF = "kvserver/telemetry/what_if.py"
WHAT_IF_UNIT = ("unit/telemetry/test_what_if.py",)
WHAT_IF_DAEMON = ("daemon/test_what_if.py",)
AGES = "kvserver/telemetry/resident_ages.py"
AGES_TESTS = ("unit/telemetry/test_resident_ages.py",)

MUTANTS = (
    # ---- benefit.py ---------------------------------------------------------------------------------
    Mutant(
        "a load that failed on one rank brought what the others loaded",
        BENEFIT, "LoadWaits.ended", "min(all_tokens)", "max(all_tokens)", ("unit/telemetry/test_benefit.py",),
    ),
    Mutant(
        "tokens from L1 count as tokens from L0",
        BENEFIT, "Benefit.request_ended", '"l1": loaded', '"l1": local',
        ("unit/telemetry/test_benefit.py::test_the_sources_add_up_to_the_prompts",),
    ),
    # ---- block_lifecycle.py -------------------------------------------------------------------------
    Mutant(
        "after lost reports requests own the blocks that they had before",
        "kvserver/telemetry/block_lifecycle.py", "_Instance.lose_track", "self.request_blocks = None", "pass",
        ("unit/telemetry/test_l0_random.py",),
    ),
    # ---- differences.py -----------------------------------------------------------------------------
    Mutant(
        "the content of a field without a value is shown",
        "kvserver/telemetry/differences.py", "_shown", 'else ""', "else str(content)",
        ("unit/telemetry/test_differences.py",),
    ),
    # ---- explain.py ---------------------------------------------------------------------------------
    Mutant(
        "the end of an earlier request with the same id is the end of this one",
        EXPLAIN, "Explain._open", "request.ended is None and ", "", EXPLAIN_TESTS,
    ),
    Mutant(
        "an id finds also the requests whose id only begins so",
        EXPLAIN, "Explain.find_requests", "(found or begun)", "[*found, *begun]", EXPLAIN_TESTS,
    ),
    Mutant(
        "requests are remembered beyond their bytes",
        EXPLAIN, "Explain._grow", "self._bytes > self._most_bytes", "False", EXPLAIN_TESTS,
    ),
    # ---- explain_facts.py ---------------------------------------------------------------------------
    Mutant(
        "chunks that were never stored count as avoidable",
        "kvserver/telemetry/explain_facts.py", "Request.tokens", "if reason not in _NEW", "", EXPLAIN_TESTS,
    ),
    # ---- resident_ages.py ---------------------------------------------------------------------------
    Mutant(
        "a chunk that a resync names is as young as the resync",
        AGES, "_Tier.add", "if stored_ns == _UNKNOWN_NS", "if False", AGES_TESTS,
    ),
    Mutant(
        "an evicted chunk is still counted by its age",
        AGES, "_Tier.remove", "self._stored_ns.pop", "self._before.pop", AGES_TESTS,
    ),
    Mutant("the sample of ages grows without limit", AGES, "_Tier.add", "> self._most", "> 1 << 60", AGES_TESTS),
    Mutant(
        "a clear of one namespace forgets the ages of all",
        AGES, "_Tier.clear", "not name.startswith(prefix)", "False", AGES_TESTS,
    ),
    # ---- what_if.py ---------------------------------------------------------------------------------
    Mutant("stores are not in the curve", WHAT_IF, "WhatIfCurve.handle", "self._stored(event)", "pass", WHAT_IF_UNIT),
    Mutant(
        "a clear of one namespace is one of all",
        WHAT_IF, "WhatIfCurve._cleared", "key[0].startswith(prefix)", "True", WHAT_IF_UNIT,
    ),
    Mutant(
        "a namespace keeps its salt when it is cleared",
        WHAT_IF, "WhatIfCurve._cleared", "del self._salts[namespace, tails]", "pass", WHAT_IF_UNIT,
    ),
    Mutant(
        "hybrid models hit wherever full attention does",
        WHAT_IF, "rules_of", "HitRules(full, chunk_tokens, others,", "HitRules(full, chunk_tokens, [],", WHAT_IF_UNIT,
    ),
    Mutant(
        "windows and states count as stored again where they were, as full attention is",
        WHAT_IF, "WhatIfCurve._stored", "rules, 1 << event.group.place", "HitRules(0xFFFF, 1, []), 1 << event.group.place",
        WHAT_IF_UNIT,
    ),
    Mutant(
        "states at the interval are not stored again by smaller sizes",
        WHAT_IF, "rules_of", "boundary_interval // chunk_tokens", "0", WHAT_IF_UNIT,
    ),
    Mutant(
        "an object of several ranks or groups has the first group's pages",
        WHAT_IF, "WhatIfCurve._stored", "event.group.place, event.pages)", "event.group.place, 1)", WHAT_IF_UNIT,
    ),
    Mutant(
        "what L1 found though it is not listed stays unlisted",
        WHAT_IF, "WhatIfCurve._looked_up", "hits, outcome.hit_chunks, pages)", "hits, outcome.hit_chunks, 0)",
        WHAT_IF_UNIT,
    ),
    Mutant(
        "a hit is no use of what it found",
        WHAT_IF, "WhatIfCurve._request_ended", "self._table.use(*lookup)", "pass", WHAT_IF_UNIT,
    ),
    Mutant(
        "lookups of an engine that has disconnected never end",
        WHAT_IF, "WhatIfCurve.handle", "owner[0] == event.instance_id", "False", WHAT_IF_UNIT,
    ),
)  # fmt: skip
