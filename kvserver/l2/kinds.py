"""Kinds of tiers, by the scheme of their URL.

Owns: the table of kinds. Packages that a kind needs are loaded when one of its tiers is made.
"""

from __future__ import annotations

from kvserver._native import HostRegion
from kvserver.config import TierUrl
from kvserver.l2.base import StorageTier
from kvserver.l2.files.make import make_file_tier
from kvserver.l2.remote.make import make_remote_tier
from kvserver.protocol import ConfigError


def make_tier(url: TierUrl, region: HostRegion, page_bytes: int, folder: str = "") -> StorageTier:
    """The tier, opening. ConfigError if the URL names nothing that can be, or a package is missing.

    `folder`: where a tier that daemons share keeps what must outlast the process; "" if there is none.
    """
    if url.kind == "file":
        return make_file_tier(url, region, page_bytes)
    if url.kind in ("s3", "valkey", "mooncake"):
        return make_remote_tier(url, region, page_bytes, folder)
    raise ConfigError(f"--l2 {url.shown}: no tier of the kind {url.kind}")
