"""Updates of the weights in place. SGLang notifies a linker of them only by the flush that most of them end with.

A writer on another machine changes the weights between two calls, and no call is made for what it writes. So an update begins where
its session begins, and again where it ends: what was computed in between is of neither weights.

Owns: the hooks at the places where each kind of update begins or ends. Refuses to know: what an update makes void.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

# One of these is entered by every kind of update, also by one that fails.
_HOOKED = ("_observe_weight_load", "begin_weight_update", "end_weight_update", "check_weights")
_ONLY_READ = frozenset({"snapshot", "compare", "checksum"})  # actions of check_weights; "reset_tensors" writes


def follow_updates(begins: Callable[[], object]) -> str | None:
    """Have `begins` called whenever an update begins, in the scheduler's thread. Returns why that is not possible, or None."""
    try:
        from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager as Manager
    except ImportError:
        return "updates of the weights cannot be followed in this SGLang"
    if missing := [name for name in _HOOKED if not hasattr(Manager, name)]:
        return f"updates of the weights cannot be followed in this SGLang: it has no {' and no '.join(missing)}"
    for name in _HOOKED:
        setattr(Manager, name, _reporting(getattr(Manager, name), begins))
    return None


def _reporting(method: Callable[..., Any], begins: Callable[[], object]) -> Callable[..., Any]:
    @functools.wraps(method)
    def report_and_call(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        """`request`: SGLang's message, or the source of an update."""
        if getattr(request, "action", None) not in _ONLY_READ:
            begins()
        return method(self, request, *args, **kwargs)

    return report_and_call
