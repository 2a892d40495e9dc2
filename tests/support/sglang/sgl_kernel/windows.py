"""A correction of SGLang 0.5.23's attention in plain torch.

It writes the KV of layers with a window into the pool of windows, and reads it there at the slots of full attention. Both pools
hand out equal slots at first, so a fresh engine computes rightly. Once they differ it computes with other tokens' KV, also without
a linker. The correction reads at the slots of the pool of windows.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

_MODULE = "sglang.srt.layers.attention.torch_native_backend"


class _Corrector(importlib.abc.MetaPathFinder):
    """Correct the module as it is imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(name, path) if name == _MODULE else None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_correct(module: ModuleType) -> None:
                execute(module)
                for method in ("_run_sdpa_forward_extend", "_run_sdpa_forward_decode"):
                    backend = module.TorchNativeAttnBackend
                    setattr(backend, method, _corrected(getattr(backend, method)))

            spec.loader.exec_module = execute_and_correct  # type: ignore[method-assign]
        return spec


def _corrected(run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def call(self: Any, query: Any, output: Any, k: Any, v: Any, table: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("sliding_window_size") is not None and self.use_sliding_window_kv_pool:
            table = self.token_to_kv_pool.full_to_swa_index_mapping[table.long()]
        return run(self, query, output, k, v, table, *args, **kwargs)

    return call


sys.meta_path.insert(0, _Corrector())
