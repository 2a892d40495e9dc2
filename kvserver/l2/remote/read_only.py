"""Client of a tier with `read_only=true`: the reading part of the store's client.

Owns: the rule that no request reaches the store which writes, deletes or creates.
"""

from __future__ import annotations

from typing import NoReturn

from kvserver.l2.remote.buffer import LaneBuffer
from kvserver.l2.remote.store import ConnectStore, StoreClient, StoreRefused


class ReadOnlyClient:
    """StoreClient that only reads."""

    def __init__(self, client: StoreClient) -> None:
        self.most_value_bytes = client.most_value_bytes
        self.most_questions, self.asks_apart = client.most_questions, client.asks_apart
        self.get, self.exist, self.read_ids, self.close = client.get, client.exist, client.read_ids, client.close

    def _refuse(self, *_arguments: object) -> NoReturn:
        raise StoreRefused("the tier is read-only")

    put = delete = refresh = create_id = write_id = _refuse


def reading(connect: ConnectStore) -> ConnectStore:
    def connect_to_read(buffer: LaneBuffer) -> StoreClient:
        return ReadOnlyClient(connect(buffer))

    return connect_to_read
