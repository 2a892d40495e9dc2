"""Check prose by three rules: `python .ci/prose.py [--table] [PATH...]`; without paths every file in git.

1. Sentences of a Markdown page have at most 18 words in the mean, none has more than 40, and at most 5% have more than 30.
2. A docstring begins with a noun, or with a verb and its object; no sentence of it has more than 40 words.
3. Markdown and docstrings use none of the words of `WORDS`.

A sentence ends at a full stop, a question mark, an exclamation mark, or the end of its paragraph, item or table cell. Code in backticks
counts as one word; fenced blocks and headings count nothing. Cells are too short for a mean: only the bound of 40 applies to them.
`--table` prints the numbers of each page.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
MEAN, LONG, LONG_SHARE, LONGEST = 18, 30, 0.05, 40
NOT_READ = re.compile(r"^(bench/results/|kvserver/web/assets/vendor/|csrc/third_party/|LICENSE)")
DOCSTRINGS = re.compile(r"^(kvserver|adapters)/")
FIRST_WORDS = {
    "of",
    "those",
    "these",
    "what",
    "whether",
    "by",
    "each",
    "none",
    "who",
    "whose",
    "which",
    "where",
    "when",
    "how",
    "why",
}
WORDS = {
    "told|tells": "reports, states, publishes",
    "says|said|hears|heard": "states, receives",
    "comings and goings": "connects and disconnects",
    "holdings": "request blocks",
    "unsure": "out of sync",
    "recounts?|recounted": "resync, audit",
    "starved|starves": "no space",
    "whoever|nobody": "the role, by its name",
    "outbox": "sender, send queue",
}
_WORDS = re.compile("|".join(rf"\b(?:{word})\b" for word in WORDS), re.IGNORECASE)
_END = re.compile(r"""(?<=[.!?])["')\]*]*\s+(?=["'(\[*]*[A-Z0-9`])|(?<=[.!?]\*\*)\s+""")


class Sentence(NamedTuple):
    line: int
    text: str
    cell: bool

    @property
    def words(self) -> int:
        return sum(1 for word in self.text.split() if re.search(r"\w", word))


def _plain(text: str) -> str:
    """Text with one word for each span of code and the words of each link alone."""
    text = re.sub(r"(`+).+?\1", "Code", text, flags=re.DOTALL)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"\b(e\.g|i\.e|etc|vs|cf)\.", r"\1", text)


def _split(line: int, text: str, cell: bool = False) -> Iterator[Sentence]:
    yield from (Sentence(line, one.strip(), cell) for one in _END.split(_plain(text)) if one and one.strip())


def sentences(page: str) -> Iterator[Sentence]:
    """Sentences of a Markdown page."""
    page = re.sub(r"<!--.*?-->", lambda c: "\n" * c[0].count("\n"), page, flags=re.DOTALL)
    fenced, paragraph, began = False, list[str](), 0

    def end() -> Iterator[Sentence]:
        yield from _split(began, " ".join(paragraph))
        paragraph.clear()

    for number, line in enumerate(page.splitlines(), 1):
        text = line.strip()
        if text.startswith(("```", "~~~")):
            fenced = not fenced
        item = re.match(r"(?:[-*+]|\d+\.) +", text)
        if fenced or not text or item or text.startswith(("```", "~~~", "#", "|", ">")):
            yield from end()
        if fenced or text.startswith(("```", "~~~", "#")):
            continue
        if text.startswith("|"):
            for cell in re.split(r"(?<!\\)\|", text.strip("|")):
                yield from _split(number, cell, cell=True)
        elif text:
            began = began if paragraph else number
            paragraph.append(text[item.end() :] if item else text.lstrip("> "))
    yield from end()


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """(line, docstring) of a module, its classes and its functions."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and (
            text := ast.get_docstring(node)
        ):
            yield node.body[0].lineno, text


def words_to_avoid(line: int, text: str) -> Iterator[tuple[int, str]]:
    """(line, problem) for each of `WORDS` in prose."""
    for found in _WORDS.finditer(_plain(text)):
        instead = next(to for word, to in WORDS.items() if re.fullmatch(word, found[0], re.IGNORECASE))
        yield line, f'"{found[0]}": write "{instead}" instead'


def numbers(page: str) -> tuple[int, float, float, int]:
    """(sentences, mean words, share above LONG, most words) of a page's paragraphs and items."""
    words = [sentence.words for sentence in sentences(page) if not sentence.cell and sentence.words > 1]
    if not words:
        return 0, 0.0, 0.0, 0
    return len(words), sum(words) / len(words), sum(count > LONG for count in words) / len(words), max(words)


def problems(path: str, text: str) -> Iterator[tuple[int, str]]:
    """(line, problem) of a Markdown page or a Python module. `path` is relative to the repository."""
    if path.endswith(".md"):
        count, mean, long, _ = numbers(text)
        if mean > MEAN:
            yield 1, f"{mean:.1f} words a sentence in the mean, at most {MEAN}"
        if long > LONG_SHARE and long * count > 1:
            yield 1, f"{long:.0%} of the sentences have more than {LONG} words, at most {LONG_SHARE:.0%}"
        for sentence in sentences(text):
            if sentence.words > LONGEST:
                yield sentence.line, f"a sentence of {sentence.words} words: {sentence.text[:60]} ..."
            yield from words_to_avoid(sentence.line, sentence.text)
    elif path.endswith(".py") and DOCSTRINGS.match(path):
        for line, docstring in docstrings(text):
            first = docstring.split()[0].strip("`\"'.,:").lower()
            if first in FIRST_WORDS:
                yield line, f'a docstring begins with "{first}", not with a noun or a verb'
            for paragraph in re.split(r"\n\s*\n|\n\s*(?=[-*] )", docstring):
                for sentence in _split(line, " ".join(paragraph.split())):
                    if sentence.words > LONGEST:
                        yield line, f"a sentence of {sentence.words} words: {sentence.text[:60]} ..."
            yield from words_to_avoid(line, docstring)


def main(arguments: list[str]) -> int:
    paths = [argument for argument in arguments if argument != "--table"]
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--", *paths], check=True, capture_output=True, text=True, cwd=ROOT
    )
    found = 0
    for path in filter(None, listed.stdout.split("\0")):
        if NOT_READ.match(path) or not path.endswith((".md", ".py")) or (ROOT / path).is_symlink():
            continue
        text = (ROOT / path).read_text()
        if "--table" in arguments:
            if path.endswith(".md"):
                count, mean, long, most = numbers(text)
                print(f"{count:5} sentences  mean {mean:4.1f}  above {LONG}: {long:4.0%}  most {most:3}  {path}")
            continue
        for line, problem in problems(path, text):
            found += 1
            print(f"{path}:{line}: {problem}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
