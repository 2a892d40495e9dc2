"""A stand-in for SGLang's compiled kernels: on CPUs without AMX tiles its layers compute with plain torch.

One function is needed all the same, to write a batch's slots into the table of requests. Any other name raises when it is called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from sgl_kernel import windows as windows  # imported for its correction


def assign_req_to_token_pool_cpu(
    requests: torch.Tensor,
    table: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    slots: torch.Tensor,
    width: int,
) -> None:
    """Write the next `end - start` of `slots` to each request's row of the table, from `start` on."""
    taken = 0
    for row, start, end in zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=True):
        table[row, start:end] = slots[taken : taken + end - start]
        taken += end - start


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} is not in the stand-in")

    return missing
