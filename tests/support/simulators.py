"""The simulators of `csrc/testing`: the native module kvserver_testing, which the editable install builds and no wheel has."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent.parent / "build/testing"))

from kvserver_testing import FakeDevice, FakeGpu, FaultyFile, Order, slow_cpu
from kvserver_testing import __file__ as MODULE

__all__ = ["MODULE", "FakeDevice", "FakeGpu", "FaultyFile", "Order", "slow_cpu"]
