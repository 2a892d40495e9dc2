"""`kvserver_l2_reads_total` had failed writes in `timeout` and `error`: while a Valkey was a replica, a twentieth of all reads seemed to fail."""

from __future__ import annotations

import errno
from pathlib import Path

from support.faulty_store import FaultyStore
from support.file_tiers import PAGE as FILE_PAGE
from support.file_tiers import FaultyDisk, FileRig, name_of
from support.l1_memory import PAGE, Ends, L1Memory, name, within

from kvserver.config import parse_tiers
from kvserver.l2 import TierOutcome
from kvserver.l2.remote.tier import RemoteTier


def test_a_refused_write_to_a_store_is_no_read() -> None:
    store, l1 = FaultyStore(), L1Memory()
    (url,) = parse_tiers(["valkey://host/p"])
    tier = RemoteTier(url, "p", l1.region, PAGE, store.connect, 2)
    ends = Ends(tier)
    try:
        ends.until("ready")
        store.read_only = True
        assert ends.of(tier.put(name(1), l1.object(PAGE), b"", within(10))).outcome is TierOutcome.UNAVAILABLE
        assert (tier.status().errors, tier.status().read_errors) == (1, 0)
        store.fail("error")
        assert ends.of(tier.get(name(1), l1.object(PAGE), within(10))).outcome is TierOutcome.UNAVAILABLE
        assert (tier.status().errors, tier.status().read_errors) == (2, 1)
    finally:
        tier.close(within(5))


def test_a_failed_write_to_a_file_is_no_read(tmp_path: Path) -> None:
    disk = FaultyDisk()
    rig = FileRig(tmp_path / "tier", "1MiB", disk=disk).opened()
    try:
        assert rig.put(name_of(1), FILE_PAGE) is TierOutcome.DONE
        disk.file.writes.error = errno.EIO
        assert rig.put(name_of(2), FILE_PAGE) is TierOutcome.UNAVAILABLE
        assert (rig.tier.status().errors, rig.tier.status().read_errors) == (1, 0)
        disk.file.reads.error = errno.EIO
        assert rig.get(name_of(1), FILE_PAGE) is TierOutcome.UNAVAILABLE
        assert (rig.tier.status().errors, rig.tier.status().read_errors) == (2, 1)
    finally:
        rig.close()
