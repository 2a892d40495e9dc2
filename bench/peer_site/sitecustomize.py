"""Lets LMCache's connector and vLLM 0.32 for CPU start in one process; `engine.py` puts it on the peer's path.

vLLM's scan of every module reads `__dict__` of llvmlite's library, which answers any name with a C function.
"""

from llvmlite.binding import ffi

_any_name = ffi._lib_wrapper.__getattr__


def _no_special_names(library: object, name: str) -> object:
    if name.startswith("__"):
        raise AttributeError(name)
    return _any_name(library, name)


ffi._lib_wrapper.__getattr__ = _no_special_names
