"""Mutants of `kvserver/replay`."""

from __future__ import annotations

from support.mutation import Mutant

BARE_L1 = "kvserver/replay/bare_l1.py"
CLUSTER = "kvserver/replay/cluster.py"
ROUTERS = "kvserver/replay/routers.py"
RECORDER = "kvserver/replay/recorder.py"
CLUSTER_TESTS = ("unit/replay/test_cluster.py",)
RECORDER_TESTS = ("unit/replay/test_recorder.py",)

MUTANTS = (
    # ---- bare_l1.py ---------------------------------------------------------------------------------
    Mutant(
        "what a machine read from L2 counts as found in L1",
        BARE_L1, "BareL1.serve", "found - filled", "found", CLUSTER_TESTS,
    ),
    # ---- cluster.py ---------------------------------------------------------------------------------
    Mutant(
        "blocks for which L1 had no space are written to L2",
        CLUSTER, "_Cluster.serve", "prompt.keys[: served.resident * KEY_BYTES]", "prompt.keys", CLUSTER_TESTS,
    ),
    # ---- recorder.py --------------------------------------------------------------------------------
    Mutant("all recordings have one salt", RECORDER, "Recorder._id", "key=self._salt", "key=b'salt'", RECORDER_TESTS),
    Mutant(
        "equal keys of two namespaces are one block of a recording",
        RECORDER, "Recorder._id", "namespace + key", "key", RECORDER_TESTS,
    ),
    Mutant(
        "a recording states its loss again in each line",
        RECORDER, "Recorder._write", "self._lost_written = lost", "pass", RECORDER_TESTS,
    ),
    Mutant(
        "a recording grows beyond its size",
        RECORDER, "Recorder._write", "self.file.bytes + len(text)", "self._bytes", RECORDER_TESTS,
    ),
    # ---- routers.py ---------------------------------------------------------------------------------
    Mutant(
        "a short common beginning decides the machine",
        ROUTERS, "PrefixAffinity.choose", "_MATCH", "0", CLUSTER_TESTS,
    ),
)  # fmt: skip
