"""The lint of prose counts sentences as a reader does, and finds what its three rules forbid; code and links stay."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
_spec = importlib.util.spec_from_file_location("prose", ROOT / ".ci" / "prose.py")
assert _spec is not None
assert _spec.loader is not None
prose = importlib.util.module_from_spec(_spec)
sys.modules["prose"] = prose
_spec.loader.exec_module(prose)

LONG = " ".join(["word"] * 41) + "."


def problems(text: str, path: str = "a.md") -> list[tuple[int, str]]:
    return [(line, problem) for line, problem in prose.problems(path, text)]


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("One two three. Four five.", [3, 2]),
        ("One two,\nthree. Four\n\nfive six", [3, 1, 2]),
        ("One, e.g. two three (four). `a.b(c, d)` is five.", [5, 3]),
        ("- one two\n- three four\n  five\n1. six seven", [2, 3, 2]),
        ("# A heading\n\nOne [two three](https://example.com/a.b), four.", [4]),
        ("```sh\none two three\n```\nFour five", [2]),
        ("**Shares safely.** One two", [2, 2]),
        ("| one two | `three` |\n| --- | --- |\n| four. Five six |  |", [2, 1, 1, 2]),
    ],
)
def test_a_sentence_ends_where_its_reader_ends_it(page: str, words: list[int]) -> None:
    assert [sentence.words for sentence in prose.sentences(page) if sentence.words] == words


def test_the_mean_the_share_of_long_sentences_and_the_longest_are_bounded() -> None:
    short = "A short sentence. " * 30
    assert problems(short) == []
    assert [problem.partition(":")[0] for _, problem in problems(short + "\n\n" + LONG)] == ["a sentence of 41 words"]
    assert any("in the mean" in problem for _, problem in problems("one two three four five six seven. " * 3 + LONG))
    thirty_one = " ".join(["word"] * 31) + ". "
    assert any("more than 30" in problem for _, problem in problems(short + thirty_one.capitalize() * 3))
    assert problems(short + thirty_one.capitalize()) == []


def test_a_cell_of_a_table_counts_for_the_longest_only() -> None:
    assert prose.numbers("| " + "word " * 35 + " |") == (0, 0.0, 0.0, 0)
    assert problems("| " + "word " * 35 + " |") == []
    assert [line for line, _ in problems("Text.\n\n| a | " + LONG + " |")] == [3]


@pytest.mark.parametrize("first", sorted(prose.FIRST_WORDS))
def test_a_docstring_begins_with_a_noun_or_a_verb(first: str) -> None:
    source = f'def f():\n    """{first.capitalize()} it is."""\n'
    assert [line for line, _ in problems(source, "kvserver/a.py")] == [2]
    assert problems(source, "tests/a.py") == []
    assert problems('def f():\n    """Names of tiers."""\n', "kvserver/a.py") == []


def test_a_docstring_has_no_sentence_above_the_longest() -> None:
    source = f'"""Names.\n\n{LONG.capitalize()}\n"""\n'
    assert [problem.partition(":")[0] for _, problem in problems(source, "adapters/a.py")] == ["a sentence of 41 words"]


@pytest.mark.parametrize("words", list(prose.WORDS))
def test_each_word_to_avoid_is_found_in_prose_and_not_in_code(words: str) -> None:
    word = words.partition("|")[0].replace("?", "")
    assert [problem for _, problem in problems(f"It is {word} here.")] == [
        f'"{word}": write "{prose.WORDS[words]}" instead'
    ]
    assert problems(f"`{word}` is code.\n\n```\n{word}\n```") == []
