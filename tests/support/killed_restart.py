"""`kvserver serve` that dies by SIGKILL at one step of a restart: a call, or a return, of code in `kvserver/restart`.

    python killed_restart.py serve FLAG…

The environment's KVSERVER_TEST_STEP is `start:N`, which counts from the read of the state until all is adopted, or `end:N`, which counts
the snapshot of L1 and its writing. A number beyond the last step is the last one: threads make their number vary. With step 0 the daemon
lives, and adds `start N` or `end N` with the last one to the file that KVSERVER_TEST_STEPS names. KVSERVER_TEST_FORMAT is the format of the states of this daemon.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType

from kvserver.__main__ import main
from kvserver.restart import adoption, kept_l1, l1_file, state

_FOLDER = str(Path(kept_l1.__file__).parent)
_FIRST: dict[CodeType, str] = {
    l1_file.L1File.read_state.__code__: "start",
    kept_l1.RestartableL1.end.__code__: "end",
}
_LAST = {adoption.Adoption._log.__code__: "start", kept_l1.RestartableL1.end.__code__: "end"}


class Steps:
    def __init__(self, phase: str, number: int, report: str) -> None:
        self._phase, self._number, self._report = phase, number, report
        self._counted = False
        self._count = 0

    def profile(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if not code.co_filename.startswith(_FOLDER):
            return
        if event == "call" and _FIRST.get(code) == self._phase:
            self._counted = True
        if not self._counted:
            return
        self._count += 1
        last = event == "return" and _LAST.get(code) == self._phase
        if self._count == self._number or (last and self._number):
            os.kill(os.getpid(), signal.SIGKILL)
        if last:
            self._counted = False
            with open(self._report, "a") as report:
                report.write(f"{self._phase} {self._count}\n")


if __name__ == "__main__":
    state.FORMAT = int(os.environ.get("KVSERVER_TEST_FORMAT", state.FORMAT))
    if step := os.environ.get("KVSERVER_TEST_STEP"):
        phase, _, number = step.partition(":")
        steps = Steps(phase, int(number), os.environ.get("KVSERVER_TEST_STEPS", os.devnull))
        threading.setprofile(steps.profile)
        sys.setprofile(steps.profile)
    main()
