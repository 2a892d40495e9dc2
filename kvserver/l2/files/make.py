"""Makes a file tier from its URL."""

from __future__ import annotations

from kvserver._native import RECORD_HEADER_BYTES, HostRegion
from kvserver.config import TierUrl, parse_size
from kvserver.l2.files.disk import Disk
from kvserver.l2.files.folder import Folder
from kvserver.l2.files.tier import FileTier

SYSTEM_DISK = Disk()


def make_file_tier(url: TierUrl, region: HostRegion, page_bytes: int, disk: Disk = SYSTEM_DISK) -> FileTier:
    """The tier, opening. It waits for the folder's first calls; ConfigError with the reason if they fail."""
    assert page_bytes % RECORD_HEADER_BYTES == 0, "L1 has pages of whole 4 KiB"
    return FileTier(url, Folder(url.path, parse_size(url.own["size"]), url.read_only, disk), region, page_bytes)
