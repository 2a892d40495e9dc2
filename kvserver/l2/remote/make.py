"""Makes a tier of a remote kind from its URL.

Owns: the number of lanes of a kind, and how much shares a command there. Refuses to know: how a client connects.
"""

from __future__ import annotations

from kvserver._native import HostRegion
from kvserver.config import TierUrl
from kvserver.l2.remote import mooncake, s3, valkey
from kvserver.l2.remote.buffer import LaneBuffer
from kvserver.l2.remote.lanes import BUNDLE_BYTES
from kvserver.l2.remote.store import ConnectStore, StoreError
from kvserver.l2.remote.tier import RemoteTier

LANES = {
    "valkey": 3,  # one connection each
    "s3": 6,  # most of a request's time is the way there and back
    "mooncake": 2,  # a process of its client each, with many threads: two cores serve a third one more slowly
}
# Mooncake's library moves the objects of a command at once, and a command wakes two processes.
_BUNDLE_BYTES = dict.fromkeys(LANES, BUNDLE_BYTES) | {"mooncake": 32 << 20}


def make_remote_tier(url: TierUrl, region: HostRegion, page_bytes: int, folder: str = "") -> RemoteTier:
    """The tier, opening: its lanes connect. ConfigError as of store_of()."""
    prefix, connect = store_of(url)
    return RemoteTier(url, prefix, region, page_bytes, connect, LANES[url.kind], _BUNDLE_BYTES[url.kind], folder)


def why_not_served(url: TierUrl) -> str:
    """Reason why the store does not answer a request now; "" if it does. Raises ConfigError as store_of() does."""
    prefix, connect = store_of(url)
    try:
        client = connect(LaneBuffer())
        try:
            client.read_ids([f"{prefix}/doctor"])
        finally:
            client.close()
    except StoreError as error:
        return str(error)
    return ""


def store_of(url: TierUrl) -> tuple[str, ConnectStore]:
    """The first part of all names there, and what connects. ConfigError if the URL names no place, or the client's package is missing."""
    if url.kind == "valkey":
        server = valkey.ValkeyUrl(url)
        valkey.require_client(url)
        return server.prefix, lambda buffer: valkey.connect(server, buffer.covers)
    if url.kind == "mooncake":
        store = mooncake.MooncakeUrl(url)
        mooncake.require_client(url)
        return store.prefix, lambda buffer: mooncake.connect(store, buffer)
    assert url.kind == "s3", url.kind
    bucket = s3.S3Url(url)
    s3.require_client(url)
    return bucket.prefix, lambda buffer: s3.connect(bucket, buffer.covers)
