"""A real `kvserver serve` process in a folder of its own, and what tests read from it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

T = TypeVar("T")
GPUS = [f"GPU-00000000-0000-0000-0000-{number:012d}" for number in range(2)]  # of --simulated-gpus 2
KVSERVER = os.environ.get("KVSERVER_BIN") or str(Path(sys.executable).parent / "kvserver")
# For these flags it is daemon_main.py that is started, by the same interpreter.
SIMULATED = {"copy_delay_us", "copy_pause", "simulated_gpus", "gpu_way", "gpu_orders", "drain_seconds", "journal_gate"}
WITH_SIMULATED = (str(Path(KVSERVER).with_name("python")), str(Path(__file__).with_name("daemon_main.py")))


def wait_until(predicate: Callable[[], T], seconds: float = 30.0, what: str = "") -> T:
    """The first true value of `predicate()`. AssertionError when `seconds` have passed without one."""
    deadline = time.monotonic() + seconds
    while True:
        value = predicate()
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {seconds} s: {what or predicate}"
        time.sleep(0.002)


def fetch(url: str, method: str = "GET", timeout: float = 20.0) -> tuple[int, str]:
    """(code, body) of one page."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=timeout) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def pin_l1(daemon: Daemon) -> None:
    """Wait until its L1 is pinned. REQUIRES: a GPU is in use."""
    wait_until(lambda: (l1 := daemon.status()["l1"])["pinned_bytes"] == l1["size_bytes"], what="L1 is pinned")


class Daemon:
    """One daemon. start() after construction or after it ended; the folder and endpoint stay the same.

    Flags are keyword arguments: `Daemon(l1_size="1MiB")` gives `--l1-size 1MiB`. `program`: by default `kvserver`, or daemon_main.py
    where flags are of that. `pauses`: its copies can be paused.
    """

    def __init__(
        self, env: dict[str, str] | None = None, program: Sequence[str] = (), pauses: bool = False, **flags: object
    ) -> None:
        # Not pytest's tmp_path: a Unix socket's path has little room.
        self.folder = Path(tempfile.mkdtemp(prefix="kvs-"))
        if pauses:
            flags["copy_pause"] = self._pause
        self.program = program or (WITH_SIMULATED if SIMULATED & flags.keys() else (KVSERVER,))
        self.flags: dict[str, object] = {
            "endpoint": f"ipc://{self.folder}/kv.sock",
            "http_port": 0,
            "l1_size": "64MiB",
            "l1_huge_pages": "transparent",  # explicit ones are another test's, of the whole machine
            "chunk_tokens": 64,
            "log_level": "info",
            **flags,
        }
        self.env = env or {}
        self.process: subprocess.Popen[str] | None = None
        self.ready_line = ""

    @property
    def endpoint(self) -> str:
        return str(self.flags["endpoint"])

    @property
    def sockets(self) -> list[Path]:
        """The socket files that it owns while it runs."""
        path = self.endpoint.removeprefix("ipc://")
        return [Path(path), Path(path + ".fd")]

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def command(self) -> list[str]:
        words = [*self.program, "serve"]
        for name, value in self.flags.items():
            for one in value if isinstance(value, list) else [value]:
                words += ["--" + name.replace("_", "-"), str(one)]
        return words

    def start(self) -> Daemon:
        """Returns when it has printed its line, and file tiers are open, but for a daemon with a gate before its journals.

        AssertionError with its log if it does not print it within a minute.
        """
        with open(self.folder / "log", "a") as log:
            self.process = subprocess.Popen(
                self.command(), stdout=subprocess.PIPE, stderr=log, text=True, env=os.environ | self.env
            )
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)
        self.ready_line = wait_until(self._read_line, 60, "the ready line")
        assert " ready: " in self.ready_line, self.ready_line + self.log
        if "journal_gate" not in self.flags and "file://" in f"{self.flags.get('l2')} {self.env.get('KVSERVER_L2')}":
            wait_until(self._files_are_open, 60, "the file tiers are open")
        return self

    def _files_are_open(self) -> bool:
        return all(tier["state"] != "opening" for tier in self.status()["l2"] if tier["url"].startswith("file:"))

    def _read_line(self) -> str:
        assert self.process is not None
        assert self.process.stdout is not None
        ended = self.process.poll() is not None
        line = self.process.stdout.readline()
        assert line or not ended, f"the daemon exited with {self.process.returncode}:\n{self.log}"
        return line

    @property
    def http_port(self) -> int:
        return int(self.ready_line.split("http://")[1].split(",")[0].rsplit(":", 1)[1])

    @property
    def boot_id(self) -> str:
        return self.ready_line.split("boot ")[1].strip()

    # ---- what it reports ---------------------------------------------------------------------

    def http(self, path: str, method: str = "GET", timeout: float = 5.0) -> tuple[int, str]:
        """(code, body) of one page."""
        return fetch(f"http://127.0.0.1:{self.http_port}{path}", method, timeout)

    def match(self, **query: Any) -> dict[str, dict[str, Any]]:
        """The answer of POST /kv/match, by instance id."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.http_port}/kv/match",
            json.dumps(query).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=5) as answer:
            return {found["instance_id"]: found for found in json.load(answer)["instances"]}

    def status(self) -> dict[str, Any]:
        code, body = self.http("/status")
        assert code == 200, body
        found: dict[str, Any] = json.loads(body)
        return found

    def tier(self) -> dict[str, Any]:
        """The only tier of L2, as /status has it."""
        (found,) = self.status()["l2"]
        return found

    def samples(self, *names: str) -> list[Sample]:
        """Those of /metrics that have one of these names, or all."""
        code, body = self.http("/metrics")
        assert code == 200, body
        if names:
            body = "".join(line for line in body.splitlines(keepends=True) if line.startswith(names))
        found = [sample for family in text_string_to_metric_families(body) for sample in family.samples]
        return [sample for sample in found if not names or sample.name in names]

    def metric(self, name: str, **labels: str) -> float | None:
        """The sum of the series of that name that have these labels; None if there is none."""
        found = [s.value for s in self.samples(name) if labels.items() <= s.labels.items()]
        return sum(found) if found else None

    def accounting(self) -> dict[str, int]:
        found: dict[str, int] = self.status()["books"]
        assert found["unbalanced"] == 0, self.log[-4000:]
        return found

    def wait_for_accounting(self, seconds: float = 30.0, **expected: int) -> None:
        """Wait until the accounting of /status has these values."""
        last: dict[str, int] = {}

        def match() -> bool:
            last.update(self.accounting())
            return all(last[name] == value for name, value in expected.items())

        try:
            wait_until(match, seconds)
        except AssertionError:
            raise AssertionError(f"the accounting is {last}, expected {expected}\n{self.log[-4000:]}") from None

    def wait_for_tiers(self, seconds: float = 60) -> Daemon:
        """Wait until all of L2 is ready; returns the daemon."""
        wait_until(
            lambda: (tiers := self.status()["l2"]) and all(tier["state"] == "ready" for tier in tiers),
            seconds, "L2 is ready",
        )  # fmt: skip
        return self

    def wait_for_clean_accounting(self) -> None:
        """Wait until nothing is in flight and no peer is connected."""
        self.wait_for_accounting(tickets=0, pins=0, leases=0, mappings=0, attachments=0, unbalanced=0)

    def clear_and_check(self) -> None:
        """Between two tests that share it: it runs, and when cleared it holds nothing for any peer, and its accounting balances."""
        assert self.running(), f"the daemon died:\n{self.log[-4000:]}"
        self.check_gpus()
        assert self.http("/cache/clear", "POST")[0] == 200
        self.wait_for_clean_accounting()
        self.wait_for_accounting(used_pages=0)
        assert self.open_memfds() == 0
        assert self.mapped_memfds() == []
        assert all(gpu["mapped_bytes"] == 0 for gpu in self.status()["gpus"])
        self.audit()

    def check_gpus(self) -> None:
        """Simulated GPUs log calls that the contract of csrc/gpu/gpu.h forbids."""
        assert self.process is None or "was misused" not in self.log, self.log[-4000:]

    def audit(self) -> None:
        """Have it audit its accounting, as soon as nothing is in flight."""
        code, body = wait_until(lambda: (answer := self.http("/audit", "POST"))[0] != 503 and answer, what="an audit")
        assert (code, json.loads(body)) == (200, {"audit": "balanced"}), self.log[-4000:]

    # ---- its copies ---------------------------------------------------------------------------

    @property
    def _pause(self) -> Path:
        return self.folder / "pause"

    @property
    def _reached(self) -> Path:
        return self.folder / "pause.reached"

    @contextlib.contextmanager
    def paused_copies(self) -> Iterator[None]:
        """Copies move their first block and then wait for the end of this; those of a GPU move nothing. REQUIRES: `pauses`."""
        assert "copy_pause" in self.flags
        self._reached.unlink(missing_ok=True)
        self._pause.touch()
        try:
            yield
        finally:
            self._pause.unlink()

    def wait_for_a_copy(self) -> None:
        """Until one waits. REQUIRES: within paused_copies()."""
        wait_until(self._reached.exists, what="a copy has begun")

    # ---- its process --------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def rss_bytes(self) -> int:
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))

    def mapped_memfds(self) -> list[str]:
        """Lines of its memory map that are memory shared by workers."""
        return [line for line in Path(f"/proc/{self.pid}/maps").read_text().splitlines() if "memfd:" in line]

    def open_memfds(self) -> int:
        """How many descriptors of memory shared by workers it holds."""
        count = 0
        for link in Path(f"/proc/{self.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                count += "memfd:" in os.readlink(link)
        return count

    def freeze(self) -> None:
        """SIGSTOP; returns when all its threads have stopped."""
        os.kill(self.pid, signal.SIGSTOP)
        tasks = Path(f"/proc/{self.pid}/task")
        wait_until(
            lambda: all((t / "stat").read_text().rsplit(")", 1)[1].split()[0] == "T" for t in tasks.iterdir()),
            what="every thread stopped",
        )

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def terminate(self, timeout: float = 60.0) -> int:
        """SIGTERM; the exit code."""
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(timeout)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """End it if it runs, and remove its folder."""
        if self.process is not None:
            if self.process.poll() is None:
                self.thaw()
                self.kill()
            assert self.process.stdout is not None
            self.process.stdout.close()
        shutil.rmtree(self.folder, ignore_errors=True)
