"""The lengths of the walks of requests, from vLLM's scheduler (a clear's from its HTTP request) to the last subscriber of events.

    .venv-vllm/bin/python bench/walk.py [--rounds 9] [--list] [--daemon-python .venv/bin/python]

A real daemon without L2, and vLLM's real scheduler with the connector around a model that is not there (tests/adapters/modelless.py): one
engine stores, another one loads. Both processes record with `sys.setprofile` which functions of kvserver are entered while one such operation is under way. Columns:
functions entered, the files that they lie in, those of the daemon's process, crossings from one thread to another one (of either process, the copying threads
included, ZMQ's own left out), and circles: files that are entered again while they are on the stack. A call of native code counts
as one function, and all native code as one file. Not counted: what a step that does nothing and a turn of the daemon's loop without
a message enter as well, unless it calls what counts; and what less than half of the rounds enter (each second's work, for
example). These are counts to look at, no goals.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any, NamedTuple, NoReturn
from urllib.request import Request as HTTPRequest
from urllib.request import urlopen

TOP = Path(__file__).resolve().parent.parent
NATIVE = "_native"
THIS_FILE = __file__
OPERATIONS = ("store", "load", "lookup", "end of request", "block report", "clear")
HANDLED_SECONDS = 0.12  # until the events of an operation were handled; an idle daemon audits after 0.25 s
COPYING_THREADS = "submit_copy"  # the native call that hands a copy to them; the end returns through an eventfd


class Function(NamedTuple):
    file: str
    name: str


class Entry(NamedTuple):
    """A function was entered. `stack`: the functions of kvserver that were running in the thread, outermost first."""

    time_ns: int
    thread: str
    stack: tuple[Function, ...]

    @property
    def function(self) -> Function:
        return self.stack[-1]


class Recorder:
    """Records all entries of this process's threads, from start() on."""

    def __init__(self, folder: Path) -> None:
        self.entries: list[Entry] = []
        self._folder = f"{folder}/"
        self._adapters = f"{folder}/adapters/" if (folder / "adapters").exists() else f"{folder.parent}/adapters/"
        self._functions: dict[CodeType, Function | None] = {}
        self._thread = threading.local()

    def start(self) -> None:
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    def _function(self, code: CodeType) -> Function | None:
        """None for what does not count: other packages, classes' bodies, comprehensions and the like."""
        if code not in self._functions:
            path, found = code.co_filename, None
            if path == THIS_FILE and code.co_name == "call_native":
                return None
            for folder, prefix in ((self._adapters, "adapters/"), (self._folder, "kvserver/")):
                if path.startswith(folder) and found is None:
                    found = Function(prefix + path.removeprefix(folder), getattr(code, "co_qualname", code.co_name))
            counts = found is not None and not code.co_name.startswith("<") and not path.endswith("__init__.py")
            self._functions[code] = found if counts else None
        return self._functions[code]

    def _profile(self, frame: FrameType, event: str, _argument: Any) -> None:
        if event not in ("call", "return"):
            return
        frames: list[FrameType] = self._thread.__dict__.setdefault("frames", [])
        stack: list[Function] = self._thread.__dict__.setdefault("stack", [])
        if event == "return":
            if frames and frames[-1] is frame:
                frames.pop()
                stack.pop()
        elif (function := self._function(frame.f_code)) is not None:
            self._enter(frames, stack, frame, function)

    def _enter(self, frames: list[FrameType], stack: list[Function], frame: FrameType, function: Function) -> None:
        frames.append(frame)
        stack.append(function)
        thread = threading.current_thread().name
        self.entries.append(Entry(time.monotonic_ns(), f"{os.getpid()} {thread}", tuple(stack)))

    def native(self, name: str) -> None:
        stack = (*self._thread.__dict__.get("stack", ()), Function(NATIVE, name))
        thread = threading.current_thread().name
        self.entries.append(Entry(time.monotonic_ns(), f"{os.getpid()} {thread}", stack))

    def watch_native(self, module: ModuleType) -> None:
        """REQUIRES: no other module has imported names of it."""

        def watched(name: str, function: Any) -> Any:
            def call_native(*arguments: Any, **named: Any) -> Any:
                self.native(name)
                return function(*arguments, **named)

            return call_native

        for name, value in list(vars(module).items()):
            if isinstance(value, type):
                for attribute, method in list(vars(value).items()):
                    if type(method).__name__ in ("nb_method", "nb_func") and not attribute.startswith("_"):
                        setattr(value, attribute, watched(f"{name}.{attribute}", method))
            elif type(value).__name__ == "nb_func":
                setattr(module, name, watched(name, value))


def start_recorder() -> Recorder:
    import kvserver
    from kvserver import _native

    recorder = Recorder(Path(kvserver.__file__).parent)
    recorder.watch_native(_native)
    recorder.start()
    return recorder


def run_daemon(path: str, flags: list[str]) -> int:
    """`kvserver serve`, whose entries are written to `path` at the end."""
    recorder = start_recorder()
    from kvserver.__main__ import main

    end = os._exit

    def written(code: int) -> NoReturn:
        sys.setprofile(None)
        Path(path).write_text(json.dumps(recorder.entries))
        end(code)

    os._exit = written  # by which the daemon ends
    return main(["serve", *flags])


@contextmanager
def daemon(python: str, folder: Path, *flags: str) -> Iterator[tuple[str, str, Path]]:
    """A recording daemon's endpoint and pages, and the file with its entries once the block was left."""
    endpoint, path = f"ipc://{folder}/daemon.sock", folder / "entries.json"
    command = [python, __file__, "--record", str(path), "--", "--endpoint", endpoint, "--http-port", "0", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        ready = process.stdout.readline()
        if " ready: " not in ready:
            raise SystemExit(f"the daemon did not start: {ready}")
        try:
            yield endpoint, ready.partition(" http ")[2].partition(",")[0], path
        finally:
            process.terminate()


class Windows:
    """When each operation was under way: intervals on the clock that processes share."""

    def __init__(self) -> None:
        self.of: defaultdict[str, list[list[tuple[int, int]]]] = defaultdict(list)  # by operation: each round's

    @contextmanager
    def open(self, name: str, goes_on: bool = False) -> Iterator[None]:
        """`goes_on`: another interval of the last round."""
        began = time.monotonic_ns()
        yield
        if not goes_on:
            self.of[name].append([])
        self.of[name][-1].append((began, time.monotonic_ns()))


class Drive:
    """Two engines that do one operation at a time: what one stores the other loads."""

    def __init__(self, endpoint: str, http: str, folder: Path) -> None:
        sys.path[:0] = [str(TOP / "tests" / "adapters"), str(TOP / "tests")]
        os.environ["PYTHONHASHSEED"] = "0"  # hashes of both engines begin alike
        from made_up_model import BLOCK
        from model_folder import write_model
        from modelless import Engine, configure

        model = write_model(folder / "model")
        made = [Engine(*configure(model, endpoint, asynchronous=False, num_blocks=400)) for _ in range(2)]
        self.storing, self.loading = made
        self.windows, self._block = Windows(), BLOCK
        self._http, self._socket = http, endpoint.removeprefix("ipc://") + ".fd"
        self._tokens = itertools.count(1)
        time.sleep(1)  # until the engines are registered and described

    def run(self, rounds: int) -> Windows:
        self._generate(rounds)
        for number in range(rounds):
            self._look_up(f"looked up {number}")
        for number in range(rounds):
            self._load(f"loaded {number}")
        for engine in (self.storing, self.loading):
            engine.close()
        return self.windows

    def _prompt(self, blocks: int) -> list[int]:
        return [next(self._tokens) % 1000 for _ in range(blocks * self._block)]

    def _generate(self, rounds: int) -> None:
        """A long answer: most steps do nothing, each 16th allocates a block, each 64th completes a chunk."""
        engine, block, windows = self.storing, self._block, self.windows
        length, chunk = 2 * block, 4 * block
        answer = engine.add("one", self._prompt(2), count=2000)
        engine.run(until=lambda: bool(answer.tokens))
        time.sleep(HANDLED_SECONDS)
        stores = 0
        while stores < rounds:
            length += 1  # computed by this step
            if length % chunk == 1:
                self._send_store()
            elif length % chunk == 2 and windows.of["store"]:  # the worker reports the store's end
                with windows.open("store", goes_on=True):
                    step(engine)
                stores += 1
            elif length % block == 1:  # a block is allocated for its token
                with windows.open("block report"):
                    step(engine)
            elif length % chunk == 0:
                with windows.open("store"):
                    step(engine)
            elif length % block in (5, 9):
                with windows.open("nothing"):
                    with socket.socket(
                        socket.AF_UNIX, socket.SOCK_SEQPACKET
                    ) as stranger:  # a turn of the loop, without a message
                        stranger.connect(self._socket)
                    step(engine)
            else:
                engine.step()
        engine.abort("one")
        engine.run()

    def _send_store(self) -> None:
        """The step after a store's sends it, and allocates a block: of the store is what follows once that was reported and handled."""
        rest = self.windows.open("store", goes_on=True)

        def begin(plan: Any) -> None:
            time.sleep(HANDLED_SECONDS)
            rest.__enter__()

        self.storing.before_step = begin
        step(self.storing)
        rest.__exit__(None, None, None)
        self.storing.before_step = lambda plan: None

    def _look_up(self, name: str) -> None:
        """A new prompt. Its chunk is missed, so a second message names the chunk's blocks (`--tails`)."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        engine, connector = self.storing, self.storing.scheduler.connector
        parameters = SamplingParams(max_tokens=1)
        request = Request(name, self._prompt(5), parameters, None, block_hasher=engine._hasher)
        time.sleep(HANDLED_SECONDS)
        with self.windows.open("lookup"):
            connector.on_new_request(request)
            time.sleep(HANDLED_SECONDS)
            while (found := connector.get_num_new_matched_tokens(request, 0))[0] is None:
                time.sleep(HANDLED_SECONDS)
        assert found == (0, False), found
        connector.request_finished(request, [])
        engine.step()

    def _load(self, name: str) -> None:
        """A chunk and a block that the other engine stored; then the request's end, without a store, and a clear of both engines' KV."""
        engine, windows, prompt = self.loading, self.windows, self._prompt(5)
        self.storing.generate(name, prompt)
        time.sleep(HANDLED_SECONDS)
        answer = engine.add(name, prompt)
        time.sleep(HANDLED_SECONDS)  # the lookup is answered
        with windows.open("load"):
            engine.run(until=lambda: name in engine.received)
            time.sleep(HANDLED_SECONDS)
        engine.run(until=lambda: len(answer.tokens) == answer.count - 1)
        assert answer.external, "nothing was loaded"
        time.sleep(HANDLED_SECONDS)
        with windows.open("end of request"):
            step(engine)
        assert answer.finish_reason is not None
        with windows.open("clear"):
            urlopen(HTTPRequest(f"{self._http}/cache/clear", method="POST")).close()
            time.sleep(HANDLED_SECONDS)


def step(engine: Any) -> None:
    engine.step()
    time.sleep(HANDLED_SECONDS)


class Walk(NamedTuple):
    functions: set[Function]
    files: set[str]
    daemon: set[str]  # those of its process
    crossings: int
    circles: set[str]


def walks(entries: Sequence[Entry], windows: Windows) -> dict[str, Walk]:
    """REQUIRES: entries in the order of their time."""
    times = [entry.time_ns for entry in entries]

    def within(intervals: Sequence[tuple[int, int]]) -> list[Entry]:
        ends = [(bisect_left(times, began), bisect_right(times, end)) for began, end in intervals]
        return [entry for first, last in ends for entry in entries[first:last]]

    def usual(rounds: Sequence[Sequence[Entry]]) -> set[Function]:
        """The functions that most rounds enter. The rest is the work of each second, or an operation that ended late."""
        seen = Counter(function for entered in rounds for function in {entry.function for entry in entered})
        return {function for function, times in seen.items() if 2 * times > len(rounds)}

    nothing = usual([within(intervals) for intervals in windows.of["nothing"]])
    found, here = {}, str(os.getpid())
    for name in OPERATIONS:
        rounds = [within(intervals) for intervals in windows.of[name]]
        counted = usual(rounds) - nothing
        crossings, circles = [], set()
        functions, daemon = set(counted), set()
        for entered in rounds:
            walked = [entry for entry in entered if entry.function in counted]
            functions |= {function for entry in walked for function in entry.stack}
            daemon |= {function.file for entry in walked if entry.thread.split()[0] != here for function in entry.stack}
            threads = [entry.thread for entry in walked]
            copies = sum(entry.function.name.endswith(COPYING_THREADS) for entry in walked)
            crossings.append(sum(a != b for a, b in itertools.pairwise(threads)) + 2 * copies)
            for entry in walked:
                circles |= circle(entry.stack)
        found[name] = Walk(functions, {function.file for function in functions}, daemon, min(crossings), circles)
    return found


def circle(stack: Sequence[Function]) -> set[str]:
    """Files that this stack entered, left for another one, and entered again."""
    files = [file for file, _ in itertools.groupby(function.file for function in stack)]
    return {file for file, times in Counter(files).items() if times > 1 and file != NATIVE}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--list", action="store_true", help="name the functions, too")
    parser.add_argument("--daemon-python", default=str(TOP / ".venv/bin/python"))
    parser.add_argument("--record", help=argparse.SUPPRESS)
    parser.add_argument("flags", nargs="*", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.record:
        return run_daemon(arguments.record, arguments.flags)
    recorder = start_recorder()
    with tempfile.TemporaryDirectory() as folder:
        flags = ("--l1-size", "64MiB", "--chunk-tokens", "64")
        try:
            with daemon(arguments.daemon_python, Path(folder), *flags) as (endpoint, http, path):
                windows = Drive(endpoint, http, Path(folder)).run(arguments.rounds)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
        theirs = [
            Entry(time_ns, thread, tuple(Function(*each) for each in stack))
            for time_ns, thread, stack in json.loads(path.read_text())
        ]
    found = walks(sorted([*recorder.entries, *theirs]), windows)
    print(f"{'':14}{'functions':>10}{'files':>7}{'in daemon':>11}{'crossings':>11}  circles")
    for name, walk in found.items():
        counts = f"{len(walk.functions):>10}{len(walk.files):>7}{len(walk.daemon):>11}{walk.crossings:>11}"
        print(f"{name:14}{counts}  {', '.join(sorted(walk.circles)) or 'none'}")
        if arguments.list:
            for file, functions in itertools.groupby(sorted(walk.functions), key=lambda function: function.file):
                print(f"    {file}: {', '.join(function.name for function in functions)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
