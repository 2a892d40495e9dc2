"""Measurements of blocks, chunks, requests and the daemon, and the formats in which they are exported.

Not exported here: `otlp` and `tracing`, which only a daemon with a collector loads, and `prometheus` and `metrics_process`,
which load the Prometheus client.
"""

from kvserver.telemetry.benefit import MOST, PHASES, SOURCES, Benefit, LoadWaits
from kvserver.telemetry.block_lifecycle import BlockLifecycle
from kvserver.telemetry.chunk_lifecycle import ChunkLifecycle
from kvserver.telemetry.explain import Explain
from kvserver.telemetry.explain_facts import Facts
from kvserver.telemetry.explain_text import advice, verdict
from kvserver.telemetry.families import Family, Kind, Metric, families_of
from kvserver.telemetry.metrics import all_families
from kvserver.telemetry.resident_ages import ResidentAges
from kvserver.telemetry.rpc_counts import LOOP, UNREADABLE, Rpc, RpcCounts
from kvserver.telemetry.sizing import with_l2
from kvserver.telemetry.what_if import WhatIfCurve
