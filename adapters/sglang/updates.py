"""Updates of the weights in place. SGLang notifies a linker of them only by the flush that most of them end with.

Owns: the hook at the place where each kind of update begins. Refuses to know: what an update makes void.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_HOOKED = "_observe_weight_load"  # entered by every kind of update, also by one that fails


def follow_updates(begins: Callable[[], object]) -> str | None:
    """Have `begins` called whenever an update begins, in the scheduler's thread. Returns why that is not possible, or None."""
    try:
        from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager as Manager
    except ImportError:
        return "updates of the weights cannot be followed in this SGLang"
    observe = getattr(Manager, _HOOKED, None)
    if observe is None:
        return "updates of the weights cannot be followed in this SGLang"

    @functools.wraps(observe)
    def observe_and_report(*args: Any, **kwargs: Any) -> Any:
        begins()
        return observe(*args, **kwargs)

    setattr(Manager, _HOOKED, observe_and_report)
    return None
