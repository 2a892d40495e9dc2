"""Objects for a tier of files in a small folder, whose data file has few pages."""

from __future__ import annotations

from collections.abc import Callable

from support.file_tiers import PAGE, FileRig

from kvserver.l2 import TierOutcome

SIZES = (3 * PAGE + 17, 2 * PAGE, 1)  # 8 pages of the data file, with the header
DONE, MISSING = TierOutcome.DONE, TierOutcome.MISSING
OTHER = b"o" * 32
MakeRig = Callable[..., FileRig]


def data_pages(rig: FileRig) -> int:
    return rig.tier.status().used_bytes // PAGE - 1  # without the file's first page
