"""Replay of a recorded stream of prompts: what a cache would have found, by size, policy and number of machines. Also such recordings."""

from kvserver.replay.cluster import Plan, PlanResult, replay_cluster
from kvserver.replay.recorder import Recorder, make_recorder
from kvserver.replay.routers import ROUND_ROBIN
from kvserver.replay.runs import SizeResult, default_sizes, replay_sizes
from kvserver.replay.trace import Trace, TraceError, read_trace
