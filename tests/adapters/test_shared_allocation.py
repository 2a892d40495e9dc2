"""The KV cache on CPU lies in shared memory from its allocation on, so that its addresses stay as model runners captured them."""

from __future__ import annotations

import errno
import mmap
import os
from typing import Any

import pytest
import torch
from modelless import KVServerConnector
from sibling import Sibling
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

from kvserver.adapters.common.exporter import CannotShare
from kvserver.adapters.common.host_memory import HostMemory, shared_allocation
from kvserver.adapters.vllm.nesting import a_sibling_allocates

SIZE = 1 << 20


def allocated() -> torch.Tensor:
    """As vLLM allocates a KV cache."""
    return torch.zeros(SIZE, dtype=torch.int8, device=torch.device("cpu"))


def test_an_export_of_memory_that_was_allocated_shared_moves_nothing() -> None:
    with shared_allocation():
        memory = allocated()
    storage, address = memory.untyped_storage(), memory.data_ptr()
    assert (storage.is_shared(), storage.nbytes(), int(memory.count_nonzero())) == (True, SIZE, 0)
    (fd,) = HostMemory([storage], may_move=False).export().fds
    memory[:3] = torch.tensor([7, 8, 9], dtype=torch.int8)
    with mmap.mmap(fd, SIZE) as seen:
        assert seen[:4] == bytes([7, 8, 9, 0])
    os.close(fd)
    assert memory.data_ptr() == address


def test_memory_whose_address_is_known_is_refused_and_stays_where_it_is() -> None:
    memory = allocated()
    address = memory.data_ptr()
    with pytest.raises(CannotShare, match="knows its addresses"):
        HostMemory([memory.untyped_storage()], may_move=False).export()
    assert (memory.data_ptr(), memory.untyped_storage().is_shared()) == (address, False)


def test_an_engine_without_space_in_shm_has_memory_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with shared_allocation():
        memory = allocated()
    assert not memory.untyped_storage().is_shared()


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(SIZE, dtype=torch.float32),
        lambda: torch.zeros(4, 4, dtype=torch.int8),
        lambda: torch.empty(SIZE, dtype=torch.int8),
    ],
    ids=["another dtype", "another shape", "not zeroed"],
)
def test_other_tensors_are_allocated_as_ever(make: Any) -> None:
    with shared_allocation():
        assert not make().untyped_storage().is_shared()


class Allocates(Sibling):
    def get_mem_pool_context(self) -> Any: ...


@pytest.mark.parametrize(("sibling", "allocates"), [(Sibling, False), (Allocates, True)])
def test_a_sibling_that_allocates_the_kv_cache_is_left_to_it(sibling: type, allocates: bool) -> None:
    """vLLM ends an engine in which two connectors want to."""
    wrapper = object.__new__(MultiConnector)
    wrapper._connectors = [object.__new__(KVServerConnector), object.__new__(sibling)]
    assert asked_by(wrapper) == allocates


def asked_by(self: MultiConnector) -> bool:
    """As by vLLM's method of this wrapper, which asks each of its connectors."""
    return a_sibling_allocates()
