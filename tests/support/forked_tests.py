"""Runs pytest in forks of one process that has imported what is slow, but nothing of ours.

Started by `support.mutation`. One JSON object per line comes in, one with the exit code goes out.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
from typing import Any

_SLOW = {
    "core": ["pytest", "hypothesis.stateful", "msgspec", "zmq", "prometheus_client", "requests"],
    "adapters": ["pytest", "hypothesis", "msgspec", "zmq", "torch", "numpy", "vllm.v1.core.sched.async_scheduler"],
}
_NOT_APPLIED = 99
_PARENT = os.getppid()  # another one means that it is dead


def child(order: dict[str, Any]) -> int:
    """pytest's exit code."""
    import pytest

    folder = order["folder"]
    os.environ["PYTHONPATH"] = folder  # of daemons
    sys.path.insert(0, folder)
    code = int(pytest.main(["-x", "-q", "-m", "not long", "-p", "no:cacheprovider", *order["tests"]]))
    ours = [m for name, m in sys.modules.items() if name.partition(".")[0] == "kvserver"]
    elsewhere = [m.__name__ for m in ours if not str(m.__file__).startswith(folder)]
    if not ours or elsewhere:
        print(f"not of the copy: {elsewhere or 'nothing was imported'}")
        return _NOT_APPLIED
    return code


def run(order: dict[str, Any]) -> int | str:
    """The exit code, "timeout", or which signal ended it."""
    pid = os.fork()
    if pid == 0:
        os.setsid()  # its daemons end with it
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT, 0o600)
        for fd in (1, 2):
            os.dup2(log, fd)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        code = _NOT_APPLIED
        try:
            code = child(order)
        finally:
            sys.stdout.flush()
            os._exit(code)
    deadline, ended = time.monotonic() + order["seconds"], False
    while not ended and time.monotonic() < deadline and os.getppid() == _PARENT:
        time.sleep(0.02)
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    os.killpg(pid, signal.SIGKILL)  # also what a failed test left behind
    _, status = os.waitpid(pid, 0)
    if not ended:
        return "timeout"
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else f"signal {-code}"


def main() -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    del sys.path[0]  # this file's folder
    for name in _SLOW[sys.argv[1]]:
        importlib.import_module(name)
    assert "kvserver" not in sys.modules
    for line in sys.stdin:
        order = json.loads(line)
        began = time.monotonic()
        code = run(order)
        print(json.dumps({"code": code, "seconds": round(time.monotonic() - began, 1)}), file=answers, flush=True)


if __name__ == "__main__":
    main()
