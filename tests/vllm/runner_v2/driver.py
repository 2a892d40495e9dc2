"""Triton's driver for CPUs. Triton looks for a backend's driver in a module of this name."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase


class CpuDriver(DriverBase):  # type: ignore[misc]
    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cpu", 0, 1)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Callable[..., Sequence[float]]:
        return _once


def _once(call: Callable[[], Any], *, quantiles: Sequence[float] = (0.5,), **kwargs: Any) -> list[float]:
    """Milliseconds, of each quantile."""
    began = time.perf_counter()
    call()
    return [(time.perf_counter() - began) * 1000] * len(quantiles)
