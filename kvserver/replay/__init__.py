"""What a cache would have found of a recorded stream of prompts, by size, policy and number of machines."""

from kvserver.replay.recorder import Recorder, make_recorder
from kvserver.replay.runs import SizeResult, default_sizes, replay_sizes
from kvserver.replay.trace import Trace, TraceError, read_trace
