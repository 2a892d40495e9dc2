"""A stand-in for torchvision, which SGLang imports for the images of models that the tests do not run.

Each submodule exists, and each name in it is an empty class.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

__version__ = "0.0"


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(__name__ + "."):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__ = _empty_class  # type: ignore[method-assign]


class _Empty(type):
    def __getattr__(cls, name: str) -> str:
        """An enumeration's value, which transformers uses as a key."""
        if name.startswith("__"):
            raise AttributeError(name)
        return name


def _empty_class(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Empty(name, (), {})


sys.meta_path.append(_Submodules())
__getattr__ = _empty_class
