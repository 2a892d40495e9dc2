"""Triton's compiler for CPUs: none. Triton looks for a backend's compiler in a module of this name."""

from __future__ import annotations

from types import ModuleType

from triton.backends.compiler import BaseBackend, GPUTarget, Language


class NoCompiler(BaseBackend):  # type: ignore[misc]
    """TRITON_INTERPRET=1 asks none of these."""

    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        return bool(target.backend == "cpu")

    def hash(self) -> str:
        return "cpu"

    def parse_options(self, options: dict[str, object]) -> object:
        raise NotImplementedError

    def add_stages(self, stages: dict[str, object], options: object, language: Language) -> None:
        raise NotImplementedError

    def load_dialects(self, context: object) -> None:
        raise NotImplementedError

    def get_module_map(self) -> dict[str, ModuleType]:
        raise NotImplementedError
