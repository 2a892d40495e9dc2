"""A linker of files for SGLang 0.5.23, the peer of ours in `sglang_engine.py`: each page of the KV cache is a file in a folder.

It is written as directly as the interface allows. A lookup looks for the files one by one. A load reads each file into its page of one
buffer and then scatters the buffer, plane by plane. A store gathers likewise and writes the files on the scheduler's thread. On a
memory file system no disk is measured.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import LayerWiseLoadCounter, UnifiedCacheLinker


class FilesLinker(UnifiedCacheLinker):  # type: ignore[misc]
    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: Any,
        extra_config: dict[str, Any],
        forward_stream: Any = None,
    ) -> None:
        self._folder, self._page = Path(extra_config["folder"]), int(params.page_size)
        kvcache = params.token_to_kv_pool_allocator.get_kvcache()
        self.pools = {PoolName.KV: kvcache}
        self.layer_done_counter = LayerWiseLoadCounter(0)
        self._planes = [
            tensor.view(-1, self._page, *tensor.shape[1:]) for tensor in kvcache.k_buffer + kvcache.v_buffer
        ]
        self._ended: list[bool] = []

    def _buffer(self, pages: int) -> torch.Tensor:
        return torch.empty(pages, len(self._planes), *self._planes[0].shape[1:], dtype=self._planes[0].dtype)

    def _pages(self, transfer: PoolTransfer) -> torch.Tensor:
        return transfer.device_indices[:: self._page] // self._page

    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        keys = transfers[0].keys
        found = next((number for number, key in enumerate(keys) if not (self._folder / key).exists()), len(keys))
        return [found] if found else []

    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        (transfer,) = transfers
        buffer = self._buffer(len(transfer.keys))
        for key, page in zip(transfer.keys, _bytes(buffer), strict=True):
            try:
                with open(self._folder / key, "rb", buffering=0) as file:
                    if file.readinto(page) != page.nbytes:
                        return False
            except OSError:
                return False
        pages = self._pages(transfer)
        for number, plane in enumerate(self._planes):
            plane[pages] = buffer[:, number]
        return True

    def offload(self, transfers: list[PoolTransfer], session_id: str | None = None) -> bool:
        (transfer,) = transfers
        pages = self._pages(transfer)
        buffer = self._buffer(len(pages))
        for number, plane in enumerate(self._planes):
            buffer[:, number] = plane[pages]
        for key, page in zip(transfer.keys, _bytes(buffer), strict=True):
            unfinished = self._folder / f"{key}.new"
            unfinished.write_bytes(page)
            os.replace(unfinished, self._folder / key)
        self._ended.append(True)
        return True

    def num_completed_offloads(self) -> int:
        return len(self._ended)

    def pop_completed_offload(self) -> bool:
        return self._ended.pop(0)

    def start_layer_wise_loading(self) -> int:
        return -1

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        return True

    def cancel_queued_load(self, rid: str) -> bool:
        return False

    def reset(self) -> None:
        self._ended.clear()

    def close(self) -> None:
        return


def _bytes(buffer: torch.Tensor) -> Any:
    """One row of bytes for each page, over the buffer's own memory."""
    return buffer.view(torch.uint8).flatten(1).numpy()
