"""The lint of words finds each word of its table in each kind of text; ordinary uses, code and public names stay."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LINT = ROOT / ".ci" / "words.py"
_spec = importlib.util.spec_from_file_location("words", LINT)
assert _spec is not None
assert _spec.loader is not None
words = importlib.util.module_from_spec(_spec)
sys.modules["words"] = words
_spec.loader.exec_module(words)

# One sentence for each row of the table, in its order, and what is found there.
SENTENCES = [
    ("The daemon is told of it.", "told"),
    ("The log says why.", "says"),
    ("The hub hears of it.", "hears"),
    ("A worker asks the daemon for a slot.", "asks the daemon for"),
    ("An engine came back.", "came"),
    ("The engine is gone.", "gone"),
    ("The setting stands in the file.", "stands"),
    ("The life of a block ends.", "life"),
    ("The books must balance.", "books"),
    ("Blocks that are held stay.", "held"),
    ("Chunks of the reach are kept.", "the reach"),
    ("The instance is unsure.", "unsure"),
    ("The tracker counts them anew.", "counts them anew"),
    ("Two chunks were starved.", "starved"),
    ("Two stores were avoided.", "avoided"),
    ("The cache takes two slots.", "takes two slots"),
    ("A block takes 48 bytes.", "takes 48 bytes"),
    ("The figures are exact.", "figures"),
    ("A restart mends it.", "mends"),
    ("Routers read the load of an engine.", "load of an engine"),
    ("A letter is dropped.", "letter"),
    ("The courier waits.", "courier"),
    ("The outbox is full.", "outbox"),
    ("All copies settle.", "settle"),
    ("The grain is a page.", "grain"),
    ("Errors reach whoever asks.", "whoever"),
]
# (file, text around a sentence, line of the sentence)
KINDS = [
    ("a.py", "x = 1  # {}\n", 1),
    ("a.py", "def f():\n    '''Noun.\n\n    {}\n    '''\n", 4),
    ("a.py", "log.info('%d blocks. {}', 1)\n", 1),
    ("a.py", "log.info(f'{{count}} blocks. {}')\n", 1),
    ("a.cpp", "int a;  // {}\n", 1),
    ("a.cu", "/* One.\n * {} */\n", 2),
    ("a.h", 'fail("{}");\n', 1),
    ("a.yaml", "annotations:\n  description: {}\n", 2),
    ("a.toml", "# {}\n", 1),
    ("a.sh", "# {}\n", 1),
    ("Makefile", "# {}\n", 1),
    ("CMakeLists.txt", "# {}\n", 1),
    ("deploy/vllm.Dockerfile", "# {}\n", 1),
    ("a.md", "One.\n\n{}\n", 3),
]
NAMES = [
    ("a.py", "def told():\n    pass\n"),
    ("a.py", "class BlockLives:\n    pass\n"),
    ("a.py", "def f(holder: int):\n    pass\n"),
    ("a.py", "class A:\n    def f(self):\n        self._outbox = 1\n"),
    ("a.py", "class A:\n    unsure: bool\n"),
    ("a.py", "GONE_SECONDS = 1\n"),
    ("a.py", "def take():\n    pass\n"),
    ("a.py", "def test_the_router_is_told_of_every_block():\n    pass\n"),
    ("recount.py", ""),
    ("a.h", "class LifeFigures {};\n"),
    ("a.h", "uint64_t held() const;\n"),
    ("a.h", "std::vector<int> held_;\n"),
    ("holdings.cpp", ""),
]
RIGHT = [
    ("a.py", "# The lock is held for one update; the GIL is not held.\n"),
    ("a.py", "# The list holds blocks; L1 holds chunks; the lifetime of a block; a lifeline; 4 stands for all.\n"),
    ("a.py", "# A request reaches the daemon and takes 3 ms; it takes a chunk's key; figure_of() is code.\n"),
    ("a.py", "# `held` and `told()` are code, as x.held and held[0] are. Letters and digits.\n"),
    ("a.py", "# A load of a chunk, the load from L1; every engine may load it.\n"),
    ("a.py", "x = held.get('told')\ny = 'self.held = told'\nz = {'gone': 1}\n"),
    ("a.py", "def store(blocks):\n    held = blocks\n    take_events = held.take\n    return held\n"),
    ("a.py", "def lock_held() -> None: ...\n"),
    ("kvserver/protocol/messages.py", "class HelloReply:\n    standing: str\n"),
    ("adapters/vllm/settings.py", "class Settings:\n    settle_ms: int = 0\n"),
    ("a.cpp", "x = it->held();\nstd::mutex mutex_;  // guards what follows; held while a call runs\n"),
    ("a.md", "What a user takes for GPU memory; bytes a thread takes from a job; to the letter; it stands still.\n"),
    ("kvserver/protocol/status.py", "class Status:\n    books: dict[str, int]\n    unsure: bool\n"),
    ("a.md", "```\nwhat is told\n```\n`kvserver_l0_unsure`, [text](told.md), `books`\n"),
    ("a.yaml", 'expr: kvserver_kv_events_held_blocks{reason="starved"}\n'),
]


def found(path: str, text: str) -> list[tuple[int, str]]:
    return [(line, word) for line, word, _ in words.findings(Path(path), text)]


def test_every_row_of_the_table_has_a_sentence() -> None:
    instead = [words.findings(Path("a.md"), sentence)[0][2] for sentence, _ in SENTENCES]
    assert instead == [row.instead for row in words.TABLE]


@pytest.mark.parametrize(("path", "around", "line"), KINDS)
def test_each_word_is_found_once_in_each_kind_of_text(path: str, around: str, line: int) -> None:
    for sentence, word in SENTENCES:
        assert found(path, around.format(sentence)) == [(line, word)]


def test_a_phrase_is_found_across_lines_of_a_comment_and_adjacent_strings() -> None:
    assert found("a.py", "# A block takes\n# 48 bytes\n") == [(1, "takes 48 bytes")]
    assert found("a.h", "// The load of\n// an engine\n") == [(1, "load of an engine")]
    assert found("a.py", "x = (\n    'a block takes '\n    '48 bytes of it'\n)\n") == [(2, "takes 48 bytes")]


@pytest.mark.parametrize(("path", "text"), NAMES)
def test_a_defined_name_is_found(path: str, text: str) -> None:
    assert found(path, text)


@pytest.mark.parametrize(("path", "text"), RIGHT)
def test_ordinary_uses_code_and_public_names_are_not_found(path: str, text: str) -> None:
    assert found(path, text) == []


def test_the_command_prints_path_line_and_replacement_of_files_in_git_and_fails(tmp_path: Path) -> None:
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci" / "words.py").write_bytes(LINT.read_bytes())
    (tmp_path / "a.md").write_text("One.\nThe figures.\n")
    (tmp_path / "CHANGELOG.md").write_text("The figures.\n")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)

    def run(*arguments: str) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, ".ci/words.py", *arguments], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.stderr == ""
        return done.returncode, done.stdout

    assert run() == (0, "")  # nothing is in git yet
    subprocess.run(["git", "add", "."], cwd=tmp_path, check=True)
    line = 'a.md:2: "figures": write "metrics, measurements, numbers" instead\n'
    assert run() == run("a.md") == (1, line)
    assert run("--count") == (1, "     1 .\n     1 in all\n")
    (tmp_path / "a.md").write_text("The metrics.\n")
    assert run() == (0, "")
