"""`kvserver top` on a real terminal and without one, beside a real daemon that ends, hangs and comes back."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
from collections.abc import Callable, Iterator

import pytest
from support import commands
from support.daemon import KVSERVER, wait_until
from support.ports import reserved_port
from support.terminal import Terminal
from support.worker import Worker, make_keys

from kvserver.protocol.client import RequestFailed

Open = Callable[..., Terminal]


@pytest.fixture
def top() -> Iterator[Open]:
    """`kvserver top` on a terminal; it ends with the test."""
    with contextlib.ExitStack() as stack:

        def make(port: int, *words: str, **options: object) -> Terminal:
            command = [KVSERVER, "top", "--interval", "0.1", "--http-port", str(port), *words]
            return stack.enter_context(contextlib.closing(Terminal(command, **options)))  # type: ignore[arg-type]

        yield make


def run(port: int, *words: str, **options: object) -> subprocess.CompletedProcess[str]:
    """Without a terminal."""
    return commands.run("top", "--http-port", str(port), *words, **options)


def used(worker: Worker) -> None:
    """One prompt that is stored and found, one that is missed."""
    keys = make_keys(3)
    worker.store(keys, worker.blocks_for(3))
    worker.lookup(keys)
    worker.load(keys, worker.blocks_for(3))
    worker.lookup(make_keys(1))
    worker.end_request(prompt_tokens=1000, local_tokens=250, loaded_tokens=600)


def test_top_shows_the_status_until_q_ends_it(make_daemon, make_worker, top):
    daemon = make_daemon()
    worker = make_worker(daemon, instance_id="engine-a")
    terminal = top(daemon.http_port)
    terminal.screen_with(f"boot {daemon.boot_id}", "engine-a")
    used(worker)
    wait_until(lambda: daemon.status()["totals"]["prompt_tokens"]["computed"] == 150)
    lines = terminal.screen_with("1,000 since the start", "never_stored 100.0%")
    shares = [
        line.split()[-1]
        for line in lines
        if line.split()[:1] in (["L0"], ["L1"], ["L2"], ["computed"]) and "since" in line
    ]
    assert shares == ["25.0%", "60.0%", "0.0%", "15.0%"]
    assert any("3 chunks, 0 evicted" in line for line in lines)
    assert any("75.0% since the start" in line for line in lines if line.startswith("HIT RATE")), lines
    (row,) = (line.split() for line in lines if line.startswith("engine-a"))
    assert row[:5] == ["engine-a", "test/model", "-", "on", "1/1"]
    terminal.press("q")
    assert terminal.wait() == 0
    assert terminal.is_as_before


def test_top_follows_the_size_of_the_window(make_daemon, top):
    terminal = top(make_daemon().http_port, columns=120, rows=50)
    lines = terminal.screen_with("boot", "no engine is connected")
    assert max(len(line.rstrip()) for line in lines) > 40
    terminal.resize(40, 5)

    def narrow() -> bool:
        newest = terminal.screens()[-1].splitlines()
        return len(newest) == 5 and max(map(len, newest)) <= 40

    wait_until(narrow)
    assert "no engine is connected" not in terminal.screens()[-1]
    terminal.resize(120, 50)
    terminal.screen_with("boot", "no engine is connected")


DOWN, UP, PAGE_DOWN, PAGE_UP = "\x1b[B", "\x1b[A", "\x1b[6~", "\x1b[5~"


def engines_on(lines: list[str]) -> list[str]:
    return [line.split()[0] for line in lines if line.startswith("engine-")]


def test_more_engines_than_lines_are_reached_by_keys(make_daemon, make_worker, top):
    daemon = make_daemon()
    names = [f"engine-{number:02}" for number in range(12)]
    for name in names:
        make_worker(daemon, instance_id=name)
    terminal = top(daemon.http_port, columns=100, rows=16)
    lines = terminal.screen_with("engine-00", "lines 2 to 15 of 21: arrow keys and page keys scroll")
    assert engines_on(lines) == names[: len(engines_on(lines))] != names
    seen = set(engines_on(lines))
    terminal.press(DOWN + DOWN)
    lines = terminal.screen_with("lines 4 to 17 of 21")
    assert seen < set(engines_on(lines))
    assert lines[0].startswith("kvserver "), "the title stays"
    terminal.press(PAGE_DOWN * 3)
    lines = terminal.screen_with("lines 8 to 21 of 21")
    assert engines_on(lines) == names
    terminal.press(UP)
    terminal.screen_with("lines 7 to 20 of 21")  # at once: the position ends where the text does
    terminal.press(PAGE_UP)
    terminal.screen_with("lines 2 to 15 of 21")
    terminal.resize(100, 30)
    lines = terminal.screen_with(names[-1])
    assert not any("lines 2" in line for line in lines), "all is shown"
    terminal.press(DOWN + "q")
    assert terminal.wait() == 0
    assert terminal.is_as_before


def test_reason_why_no_daemon_answers_stays_while_top_is_scrolled(make_daemon, make_worker, top):
    daemon = make_daemon()
    for number in range(12):
        make_worker(daemon, instance_id=f"engine-{number:02}")
    terminal = top(daemon.http_port, rows=16)
    terminal.screen_with("engine-00")
    daemon.kill()
    terminal.screen_with("NO ANSWER", "lines 2 to 15 of ")
    terminal.press(PAGE_DOWN)
    lines = terminal.screen_with("NO ANSWER", "engine-11")
    assert lines[0].startswith("NO ANSWER")


def test_top_outlives_the_daemon_and_finds_the_next_one(make_daemon, top):
    daemon = make_daemon()
    terminal = top(daemon.http_port)
    first = daemon.boot_id
    terminal.screen_with(f"boot {first}")
    daemon.flags["http_port"] = daemon.http_port
    daemon.kill()
    terminal.screen_with("NO ANSWER", "no daemon answers", f"boot {first}")
    daemon.start()
    assert daemon.boot_id != first
    lines = terminal.screen_with(f"boot {daemon.boot_id}")
    assert not any("NO ANSWER" in line for line in lines)


def test_top_waits_for_a_daemon_that_does_not_run_yet(make_daemon, top):
    reservation, port = reserved_port()
    with reservation:
        terminal = top(port)
        terminal.screen_with("no daemon answers")
        daemon = make_daemon(http_port=port)
        terminal.screen_with(f"boot {daemon.boot_id}")


def test_q_ends_top_while_the_daemon_hangs(make_daemon, top):
    daemon = make_daemon()
    terminal = top(daemon.http_port)
    terminal.screen_with("boot")
    daemon.freeze()
    terminal.press("q")
    assert terminal.wait() == 0
    assert terminal.is_as_before


def test_colours_are_used_on_a_terminal_and_not_with_no_color(make_daemon, top):
    daemon = make_daemon()
    for env, coloured in ({}, True), ({"NO_COLOR": "1"}, False):
        terminal = top(daemon.http_port, **env)
        terminal.screen_with("boot")
        assert ("\x1b[32mready" in terminal.read()) is coloured
        assert bool(re.search(r"\x1b\[(\d+;)*3\d[;m]", terminal.read())) is coloured


@pytest.mark.parametrize(("end", "code"), [(lambda t: t.press("\x03"), 0), (lambda t: t.process.terminate(), 143)])
def test_terminal_is_restored_however_top_ends(make_daemon, top, end, code):
    terminal = top(make_daemon().http_port)
    terminal.screen_with("boot")
    assert not terminal.is_as_before
    end(terminal)
    assert terminal.wait() == code
    assert terminal.is_as_before


def test_ctrl_z_does_not_leave_the_screen_of_top_to_the_shell(make_daemon, top):
    terminal = top(make_daemon().http_port)
    terminal.screen_with("boot")
    terminal.press("\x1a")
    drawn = len(terminal.screens())
    wait_until(lambda: len(terminal.screens()) > drawn + 1, what="it goes on")
    terminal.press("q")
    assert terminal.wait() == 0
    assert terminal.is_as_before


def test_an_engine_without_cache_is_shown_with_the_reason(make_daemon, make_worker):
    daemon = make_daemon()
    make_worker(daemon, instance_id="half", world_size=2)
    make_worker(daemon, instance_id="a")
    twin = make_worker(daemon, instance_id="a", connect_now=False)
    twin.attach()
    with pytest.raises(RequestFailed):
        twin.register()
    shown = run(daemon.http_port, "--once").stdout
    assert "half runs without cache: 1 of 2 ranks registered: no cache until all are" in shown
    assert "a runs without cache: duplicate_instance: instance id 'a' belongs to another live engine" in shown
    assert [line.split()[3] for line in shown.splitlines() if line.startswith("a ") and "runs" not in line] == [
        "NO",
        "on",
    ]


def test_names_of_engines_write_nothing_to_the_terminal(make_daemon, make_worker, top):
    daemon = make_daemon()
    make_worker(daemon, instance_id="a\x1b[2Jb", model_name="m\x07\r\n\x9b31m" + "\u4e2d" * 40)
    terminal = top(daemon.http_port, columns=60)
    lines = terminal.screen_with("a\\x1b[2Jb")
    assert "\x1b[2J" not in terminal.read()
    assert not {"\x07", "\x9b"} & set(terminal.read())
    assert max(len(line) + sum(one == "\u4e2d" for one in line) for line in lines) <= 60


def test_top_once_prints_one_screen_as_text_and_as_json(make_daemon, make_worker):
    daemon = make_daemon()
    used(make_worker(daemon, instance_id="engine-a"))
    wait_until(lambda: daemon.status()["totals"]["prompt_tokens"]["computed"] == 150)
    ended = run(daemon.http_port, "--once")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "\x1b" not in ended.stdout
    assert ended.stdout.startswith("kvserver ")
    ended = run(daemon.http_port, "--once", "--json")
    found = json.loads(ended.stdout)
    assert found["status"]["totals"]["prompt_tokens"] == {"l0": 250, "l1": 600, "l2": 0, "computed": 150}
    assert found["status"]["boot_id"] == daemon.boot_id
    assert found["rates"]["window_seconds"] > 0
    assert (found["rates"]["lookups"], found["rates"]["engines"]) == (0, {"engine-a": 0})


def test_top_on_a_pipe_prints_screen_after_screen_until_its_reader_ends(make_daemon):
    daemon = make_daemon()
    for words in ("", "--json"):
        command = (
            f"{KVSERVER} top --interval 0.1 --http-port {daemon.http_port} {words} | head -n 3; echo ${{PIPESTATUS[0]}}"
        )
        ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=30)
        lines = ended.stdout.splitlines()
        assert (ended.stderr, lines[-1], len(lines)) == ("", "0", 4)
        assert daemon.boot_id in lines[0]
        assert not words or [json.loads(line)["status"]["boot_id"] for line in lines[:3]] == [daemon.boot_id] * 3


def test_top_once_without_a_daemon_exits_with_code_one():
    reservation, port = reserved_port()
    with reservation:
        for words in (["--once"], ["--once", "--json"]):
            ended = run(port, *words)
            assert (ended.returncode, ended.stdout) == (1, "")
            assert "no daemon answers" in ended.stderr


def test_a_token_that_is_missing_is_reported(make_daemon, tmp_path, top):
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_text("0123456789abcdef0123456789abcdef")
    daemon = make_daemon(http_token_file=token)
    ended = run(daemon.http_port, "--once")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "answers 401" in ended.stderr
    top(daemon.http_port).screen_with("answers 401")
    assert daemon.boot_id in run(daemon.http_port, "--once", "--http-token-file", str(token)).stdout
    assert run(daemon.http_port, "--http-token-file", str(tmp_path / "none")).returncode == 2


@pytest.mark.parametrize("seconds", ["0", "-1", "soon", "nan"])
def test_an_interval_that_makes_no_sense_is_refused(seconds):
    assert run(1, "--interval", seconds).returncode == 2


def test_help_of_top_has_an_example_and_the_exit_codes():
    shown = commands.run("top", "--help").stdout
    assert "kvserver top --once" in shown
    assert "exit codes: 0 ended by q" in shown
