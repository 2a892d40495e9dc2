"""How long the walk of a store, a lookup and a block report is, from vLLM's scheduler to the last subscriber of events.

    .venv-vllm/bin/python bench/walk.py [--rounds 9] [--list] [--daemon-python .venv/bin/python]

A real daemon, and vLLM's real scheduler with the connector around a model that is not there (tests/adapters/modelless.py). Both
processes record with `sys.setprofile` which functions of kvserver are entered while one such operation is under way. Columns:
functions entered, the files that they lie in, crossings from one thread to another one (of either process, the copying threads
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
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any, NamedTuple

TOP = Path(__file__).resolve().parent.parent
NATIVE = "_native"
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
            if path == __file__ and code.co_name == "call_native":
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

    code = main(["serve", *flags])
    sys.setprofile(None)
    Path(path).write_text(json.dumps(recorder.entries))
    return code


@contextmanager
def daemon(python: str, folder: Path, *flags: str) -> Iterator[tuple[str, Path]]:
    """A recording daemon's endpoint, and the file with its entries once the block was left."""
    endpoint, path = f"ipc://{folder}/daemon.sock", folder / "entries.json"
    command = [python, __file__, "--record", str(path), "--", "--endpoint", endpoint, "--http-port", "0", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        ready = process.stdout.readline()
        if " ready: " not in ready:
            raise SystemExit(f"the daemon did not start: {ready}")
        try:
            yield endpoint, path
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


def drive(endpoint: str, folder: Path, rounds: int) -> Windows:
    """Let an engine do one operation at a time."""
    sys.path[:0] = [str(TOP / "tests" / "adapters"), str(TOP / "tests")]
    from made_up_model import BLOCK
    from model_folder import write_model
    from modelless import Engine, configure
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    engine = Engine(*configure(write_model(folder / "model"), endpoint, asynchronous=False, num_blocks=400))
    windows = Windows()
    connector = engine.scheduler.connector

    def step() -> None:
        engine.step()
        time.sleep(HANDLED_SECONDS)

    def second_half(plan: Any) -> None:
        """The scheduler's part of the step is done, and its reports are sent: the rest is the end of the store."""
        engine.before_step = lambda plan: None
        time.sleep(HANDLED_SECONDS)
        engine.after_step = lambda plan: rest.__exit__(None, None, None)
        rest.__enter__()

    tokens = itertools.count(1)
    time.sleep(1)  # until the engine is registered and described
    answer = engine.add("one", [next(tokens) for _ in range(2 * BLOCK + 2)], count=2000)
    length = 2 * BLOCK + 2
    done = 0
    step()
    while done < rounds:
        length += 1  # computed by this step
        if length % BLOCK == 1:  # a block is allocated for its token
            if length % (4 * BLOCK) == 1:
                rest = windows.open("store", goes_on=True)
                engine.before_step = second_half
                step()
                engine.after_step = lambda plan: None
                done += 1
            else:
                with windows.open("block report"):
                    step()
        elif length % (4 * BLOCK) == 0:
            with windows.open("store"):
                step()
        elif length % BLOCK in (5, 9):
            with windows.open("nothing"):
                with socket.socket(
                    socket.AF_UNIX, socket.SOCK_SEQPACKET
                ) as stranger:  # the daemon's loop takes a turn, without a message
                    stranger.connect(endpoint.removeprefix("ipc://") + ".fd")
                step()
        else:
            engine.step()
    assert len(answer.tokens) > rounds
    for number in range(rounds):
        parameters = SamplingParams(max_tokens=1)
        prompt = [next(tokens) % 1000 for _ in range(5 * BLOCK)]
        request = Request(f"looked up {number}", prompt, parameters, None, block_hasher=engine._hasher)
        time.sleep(HANDLED_SECONDS)
        with windows.open("lookup"):
            connector.on_new_request(request)
            time.sleep(HANDLED_SECONDS)
            found = connector.get_num_new_matched_tokens(request, 0)
        assert found == (0, False), found
        connector.request_finished(request, [])
        engine.step()
    engine.abort("one")
    engine.run()
    engine.close()
    return windows


class Walk(NamedTuple):
    functions: set[Function]
    files: set[str]
    crossings: int
    circles: set[str]


def walks(entries: Sequence[Entry], windows: Windows) -> dict[str, Walk]:
    def within(intervals: Sequence[tuple[int, int]]) -> list[Entry]:
        return [entry for entry in entries if any(began <= entry.time_ns <= end for began, end in intervals)]

    nothing = {entry.function for intervals in windows.of["nothing"] for entry in within(intervals)}
    found = {}
    for name in ("store", "lookup", "block report"):
        rounds = [within(intervals) for intervals in windows.of[name]]
        seen = Counter(function for entered in rounds for function in {entry.function for entry in entered})
        counted = {function for function, times in seen.items() if 2 * times > len(rounds) and function not in nothing}
        crossings, circles = [], set()
        functions = set(counted)
        for entered in rounds:
            walked = [entry for entry in entered if entry.function in counted]
            functions |= {function for entry in walked for function in entry.stack}
            threads = [entry.thread for entry in walked]
            copies = sum(entry.function.name.endswith(COPYING_THREADS) for entry in walked)
            crossings.append(sum(a != b for a, b in itertools.pairwise(threads)) + 2 * copies)
            for entry in walked:
                circles |= circle(entry.stack)
        found[name] = Walk(functions, {function.file for function in functions}, min(crossings), circles)
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
        with daemon(arguments.daemon_python, Path(folder), "--l1-size", "64MiB", "--chunk-tokens", "64") as (at, path):
            windows = drive(at, Path(folder), arguments.rounds)
        sys.setprofile(None)
        theirs = [
            Entry(time_ns, thread, tuple(Function(*each) for each in stack))
            for time_ns, thread, stack in json.loads(path.read_text())
        ]
    found = walks(sorted([*recorder.entries, *theirs]), windows)
    print(f"{'':14}{'functions':>10}{'files':>7}{'crossings':>11}  circles")
    for name, walk in found.items():
        counts = f"{len(walk.functions):>10}{len(walk.files):>7}{walk.crossings:>11}"
        print(f"{name:14}{counts}  {', '.join(sorted(walk.circles)) or 'none'}")
        if arguments.list:
            for file, functions in itertools.groupby(sorted(walk.functions), key=lambda function: function.file):
                print(f"    {file}: {', '.join(function.name for function in functions)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
