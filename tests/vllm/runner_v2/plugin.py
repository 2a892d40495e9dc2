"""vLLM's plugin, which it loads in each of its processes: asynchronous scheduling stays on, and no engine starts otherwise.

It also halves the time of a step, which Triton's interpreter spends in Python. By itself that replaces the functions of its language
for each launch of a kernel and each call of a function in one, and looks for overflows. It runs the programs of a launch one after the
other, so the copies of states, which are looked for in every step, are one program each.
"""

from __future__ import annotations

import functools
import logging
import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import triton.language as language
from triton.runtime import interpreter
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.worker import mamba_utils

from runner_v2 import CHECKED

log = logging.getLogger("vllm.runner_v2")


class AnotherWorker(Exception):
    """The engine does not run what GPUs run."""


def install() -> None:
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") != "1":
        return
    _quicken()
    # The engine's process loads plugins while it constructs its EngineCore, so that is too late to wrap.
    Scheduler.__init__ = _checked(Scheduler.__init__)
    CpuPlatform.check_and_update_config = _asynchronous(CpuPlatform.check_and_update_config)


def _quicken() -> None:
    """REQUIRES: this process compiles no kernel."""
    replaced, builder = interpreter._LangPatchScope(), interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)  # as in kernels that are compiled
    interpreter._patch_lang(SimpleNamespace(__globals__={"language": language}))
    interpreter._patch_builtin(language.core, builder, replaced)
    interpreter._patch_lang_core(language.core, replaced)
    interpreter._patch_lang = lambda kernel: interpreter._LangPatchScope()  # which restores nothing
    mamba_utils._TEMPORAL_TILES = 1  # not 16: parts of one copy, for a GPU's processors


def _asynchronous(update: Any) -> Any:
    @functools.wraps(update)
    def check_and_update_config(vllm_config: Any) -> None:
        scheduling = vllm_config.scheduler_config
        chosen = scheduling.async_scheduling
        update(vllm_config)  # it would switch it off: "not required on CPU"
        scheduling.async_scheduling = chosen

    return staticmethod(check_and_update_config)


def _checked(construct: Any) -> Any:
    @functools.wraps(construct)
    def __init__(self: Scheduler, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        runner, scheduling = self.vllm_config.use_v2_model_runner, self.vllm_config.scheduler_config.async_scheduling
        if (runner, scheduling, isinstance(self, AsyncScheduler)) != (True, True, True):
            raise AnotherWorker(f"model runner V2: {runner}, asynchronous scheduling: {scheduling}, {type(self)}")
        log.info(CHECKED)

    return __init__
