"""A tier of a remote kind from its URL.

Owns: how many lanes a kind has. Refuses to know: how a client connects.
"""

from __future__ import annotations

from kvserver._native import HostRegion
from kvserver.config import TierUrl
from kvserver.l2.remote import s3, valkey
from kvserver.l2.remote.tier import RemoteTier

VALKEY_LANES = 3  # one connection each
S3_LANES = 6  # most of a request's time is the way there and back


def make_remote_tier(url: TierUrl, region: HostRegion, page_bytes: int) -> RemoteTier:
    """The tier, opening: its lanes connect. ConfigError if the URL names no place, or the client's package is missing."""
    if url.kind == "valkey":
        place = valkey.ValkeyUrl(url)
        valkey.require_client(url)
        return RemoteTier(url, place.prefix, region, page_bytes, lambda: valkey.connect(place), VALKEY_LANES)
    assert url.kind == "s3", url.kind
    bucket = s3.S3Url(url)
    s3.require_client(url)
    return RemoteTier(url, bucket.prefix, region, page_bytes, lambda: s3.connect(bucket), S3_LANES)
