"""Native calls of a process that may make no more threads: they go on with those there are."""

from __future__ import annotations

import subprocess
import sys

import pytest

DIGESTS = """
import resource, sys
from array import array
from kvserver._native import HostRegion, digest_objects
region, count = HostRegion(64 << 20), 16384
counts, extents = array("I", [1] * count).tobytes(), array("I", [word for page in range(count) for word in (page, 1)]).tobytes()
alone = digest_objects(region, 4096, counts, extents, 1)
used = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (used + int(sys.argv[1]) * (1 << 20),) * 2)
assert digest_objects(region, 4096, counts, extents, 16) == alone
"""


@pytest.mark.parametrize("left_mib", [4, 20, 80])
def test_digests_are_made_with_the_threads_that_there_are(left_mib: int) -> None:
    """A thread has 8 MiB of stack."""
    ended = subprocess.run([sys.executable, "-c", DIGESTS, str(left_mib)], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
