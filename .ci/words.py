"""Find words that the project does not use, and state what to write instead: `python .ci/words.py [--count] [PATH...]`.

Reads comments, docstrings, prose in string literals, Markdown, other text files, and names where Python and C++ define
them. Does not read code in backticks or fenced blocks. Without paths: every file in git. `--count`: findings per folder.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent


class Row(NamedTuple):
    """`prose` and `names` are patterns. A name is matched in lower case, its words joined by "_" and one "_" at both ends."""

    prose: str
    names: str
    instead: str


_WHAT = r"(?:(?:an?|the|its|their|our|each|every|all|both|two|no|more|new|free|these|those|that|\d+) ){0,2}"
_MEMORY = r"(?:bytes|[KMG]i?B|memory|room|space)\b"

TABLE = (
    Row(
        r"told|tells?|telling|untold",
        r"_(?:told|untold|tells?|teller)_",
        "reports, states, publishes (apart: distinguish)",
    ),
    Row(r"says?|said|saying", r"_(?:says?|said)_", "states, reports, reads"),
    Row(r"hears?|heard|hearing", r"_(?:hears?|heard)_", "receives, is notified"),
    Row(r"ask(?:s|ed|ing)?(?: \w+){0,2} for", r"_asked_for_", "requests, needs"),
    Row(r"came(?! from)", r"_came_(?!from_)", "arrived, connected, happened"),
    Row(r"gone", r"_gone_", "disconnected, ended, removed"),
    Row(
        r"(?:stand|stands|stood|standing)(?!(?: in)? for\b| still\b)",
        r"_(?:stands|stood|standing)_",
        "is, is in, is registered, is connected",
    ),
    Row(
        r"life|lives|comings and goings|comes? and goe?s?",
        r"_(?:life|lives)_",
        "lifetime (block, chunk), incarnation (engine), runs, is in",
    ),
    Row(r"books", r"_books_", "accounting"),
    Row(
        r"held(?! (?:back|up)\b)|holders?|holdings",
        r"_(?:held(?!_back)|holders?|holdings?)_",
        "resident, owned, kept; owner; request blocks",
    ),
    Row(
        r"(?:the|its|their|an?|whose|same|own|another|every|by|one|(?<!out\s)of|\w's) reach|(?:the|of|their|those|these|all|many|two|such) reaches",
        r"(?<!_can)(?<!_to)(?<!_not)_reach_$|^_+reach_|_reaches_$",
        "namespace prefix",
    ),
    Row(r"unsure", r"_unsure_", "out of sync"),
    Row(
        r"recount(?:s|ed|ing)?|count(?:s|ed|ing)?(?: \w+){0,2} (?:anew|afresh)",
        r"_recount(?:s|ed|ing)?_",
        "resync, audit",
    ),
    Row(r"starv(?:ed|es?|ing)", r"_starv(?:ed|es?|ing)_", "no space"),
    Row(r"(?<!be\s)avoided(?! by\b)", r"_avoided_", "already cached"),
    Row(
        rf"(?:take|takes|took|taken|taking) {_WHAT}(?:pages?|slots?|extents?)|(?:pages?|slots?|extents?) (?:are|is|was|were|been|be) (?:taken|given)"
        r"|(?:give|gives|gave|given|giving)(?:(?: \w+){0,2} (?:back|out)|(?: blocks?| slots?| pages?)? away)",
        r"^_+(?:take|give|give_back|take_back|give_out)_$",
        "allocate, free (of a pool), return; a name states what is taken: drain_records",
    ),
    Row(
        rf"(?:take|takes|took|taking) (?:(?!of|from|to|in|and|or|for|that|turns|leave)[\w.,*+-]+ ){{0,4}}{_MEMORY}(?! (?:from|away)\b)"
        r"|(?:memory|bytes|room|space) (?:(?:that|which)(?: \w+){1,2}|it|they|an? \w+|the \w+) (?:takes?|took)(?! from\b)",
        "(?!)",
        "uses N bytes",
    ),
    Row(r"figures?", r"_figures?_", "metrics, measurements, numbers"),
    Row(r"mend(?:s|ed|ing)?", r"_mend(?:s|ed)?_", "fix"),
    Row(
        r"load of (?:(?:an?|the|its|each|every|that|this|one|all) )?(?:engine|instance|server)s?|(?:engine|instance|server|scheduler)(?:['’]s|s['’]) load"
        r"|(?<!let\san\s)engine load(?! (?:it|them|an?|the|chunks?|blocks?|what|from|its|every|all)\b)",
        "(?!)",
        "engine stats (a load is a copy from L1 to L0)",
    ),
    Row(r"(?<!to\sthe\s)letters?(?! (?:and|or) (?:digits|numbers))", r"_letters?_", "message"),
    Row(r"couriers?", r"_couriers?_", "sender"),
    Row(r"outbox(?:es)?", r"_outbox(?:es)?_", "send queue"),
    Row(r"settl(?:e|es|ed|ing)", r"_settl(?:e|es|ed|ing)_", "complete, wait for"),
    Row(r"grains?", r"_grains?_", "granularity"),
    Row(
        r"whoever|whomever|nobody|anybody|somebody|everybody|what came(?! from)",
        r"_(?:whoever|nobody|anybody|somebody|everybody)_|_what_came_",
        "the subject's name, no, none",
    ),
)

# Public names that contain such words. They are names of messages, fields, settings, `/status` keys and metrics,
# defined only in files whose path the second word, a pattern, finds.
PUBLIC = {
    "KVEventsTaken": "",
    "ReaderCame": "kv_events/types",
    "ReaderGone": "kv_events/types",
    "reach": "kv_events/types",
    "TakeKVEvents": "",
    "avoided_chunks": "",
    "books": "status|protocol",
    "dropped_reaches": "status",
    "gone_seconds": "status|protocol",
    "held_blocks": "",
    "recounts": "status",
    "says_detached": "",
    "settle_ms": "settings",
    "standing": "protocol",
    "standing_text": "protocol",
    "starved": "protocol",
    "starved_chunks": "",
    "unsure": "status|protocol",
}
# A mutex, the GIL and the like are held: with one of these nearby the word is right.
LOCKS = re.compile(r"(?<![bc])lock|mutex|\bGIL\b|semaphore", re.IGNORECASE)

# Not read: history, results, generated and recorded files, the license, and this table with its test.
SKIPPED = re.compile(
    r"^(?:CHANGELOG\.md|LICENSE|bench/results/.*|deploy/grafana/kvserver\.json|tests/daemon/status_shape\.txt|\.ci/words\.py|csrc/third_party/.*|kvserver/web/assets/vendor/.*|tests/test_words\.py)$"
)
TEXT = {".yaml", ".yml", ".toml", ".sh", ".conf", ".service", ".cmake", ".txt"}
TEXT_NAMES = {"Makefile", "CMakeLists.txt", "Dockerfile", "run"}
PYTHON = {".py", ".pyi"}
CPP = {".cpp", ".cu", ".h", ".cuh", ".c", ".hpp"}


def _compiled(patterns: list[str], before: str, after: str) -> re.Pattern[str]:
    either = "|".join(f"(?P<r{at}>{pattern})" for at, pattern in enumerate(patterns))
    return re.compile(f"{before}(?:{either}){after}", re.IGNORECASE)


# Not beside what makes a word part of code: "x.held", "held(", "[held]", "held=", "--held", "/held", '="held"'.
PROSE = _compiled(
    [row.prose.replace(" ", r"\s+") for row in TABLE],
    r"(?<![\w./$@{\[-])(?<!=[\"'])(?<!~[\"'])",
    r"(?![\w\[(=]|\.\w|-\w|/\w)",
)
NAMES = [re.compile(row.names) for row in TABLE]

_STRING = r"'(?:\\.|[^'\\\n])*'|\"(?:\\.|[^\"\\\n])*\""
PYTHON_TOKENS = re.compile(
    rf"(?P<comment>\#[^\n]*)|(?P<prefix>(?<!\w)[rbfuRBFU]{{0,2}})(?P<string>'''.*?'''|\"\"\".*?\"\"\"|{_STRING})",
    re.DOTALL,
)
CPP_TOKENS = re.compile(
    rf"(?P<comment>//[^\n]*|/\*.*?\*/)|(?P<prefix>)(?P<string>R\"\((?:.*?)\)\"|{_STRING})", re.DOTALL
)
CODE = re.compile(
    r"[=!]=|\bself\.|^\s*(?:def|class|import|from|return|assert|if|for|while) .*[:()=]|\w\(\w*\)$|;\s*$| [-+*]?= |::|->|\w\(\w*\["
)
CPP_DEFINED = re.compile(
    r"(?:\b(?!return\b|case\b|else\b|new\b|delete\b|throw\b|goto\b|not\b|and\b|or\b|co_return\b)[A-Za-z_]\w*|>|[\w>][*&]{1,2})\s+[*&]{0,2}([A-Za-z_]\w*)\s*(?=[;=,(){}\[:])"
)


def _blank(text: str) -> str:
    """The line ends of `text`; no pattern matches across it."""
    return "\0" + "\n" * text.count("\n") + "\0"


def _without_code_spans(text: str) -> str:
    return re.sub(r"(?<!`)(`{1,2})(?!`)(?:(?!\n\s*\n)[^`])+\1(?!`)", lambda span: _blank(span[0]), text)


def _prose_of_tokens(text: str, tokens: re.Pattern[str]) -> str:
    """Comments and prose in strings at their places, the rest blank. Lines of one comment, and adjacent strings, are one text."""
    parts, end = [], 0
    for token in tokens.finditer(text):
        between = text[end : token.start()]
        parts.append(_blank(between) if between.strip() else between)
        end = token.end()
        found = token[0]
        if token["comment"]:
            parts.append(
                re.sub(
                    r"^(?:#+|//+)|/\*+|\*+/|^[ \t]*\*(?= )", lambda sign: " " * len(sign[0]), found, flags=re.MULTILINE
                )
            )
            continue
        if "f" in token["prefix"].lower():
            found = re.sub(r"\{[^{}]*\}", lambda field: _blank(field[0]), found)
        if re.search(r"[A-Za-z]\S* |\s[A-Za-z]", found) and (
            "\n" in found or not CODE.search(found[len(token["prefix"]) :].strip("\"'"))
        ):
            parts.append(re.sub(r"^\w*[\"']+|[\"']+$|\\n", lambda quote: " " * len(quote[0]), found))
        else:
            parts.append(_blank(found))
    return "".join(parts)


def _prose(path: Path, text: str) -> str | None:
    """`text` with everything blank that is not prose; None for a kind of file that is not read."""
    if path.suffix in PYTHON:
        return _without_code_spans(_prose_of_tokens(text, PYTHON_TOKENS))
    if path.suffix in CPP:
        return _without_code_spans(_prose_of_tokens(text, CPP_TOKENS))
    if path.suffix == ".md":
        text = re.sub(r"^( *)(```+|~~~+).*?^ *\2", lambda block: _blank(block[0]), text, flags=re.DOTALL | re.MULTILINE)
        text = re.sub(r"\]\([^)\n]*\)|https?://\S+", lambda link: _blank(link[0]), text)
        return _without_code_spans(text)
    if path.suffix in TEXT or path.name in TEXT_NAMES or path.name.endswith("Dockerfile"):
        return _without_code_spans(
            re.sub(r"^[ \t]*(?:#+|//+)", lambda sign: " " * len(sign[0]), text, flags=re.MULTILINE)
        )
    return None


def _python_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, name) of functions, classes, parameters, attributes, and of what a module or class assigns."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr
        if isinstance(node, (ast.Module, ast.ClassDef)):
            for statement in node.body:
                targets = (
                    statement.targets
                    if isinstance(statement, ast.Assign)
                    else [statement.target]
                    if isinstance(statement, ast.AnnAssign)
                    else []
                )
                yield from ((target.lineno, target.id) for target in targets if isinstance(target, ast.Name))


def _cpp_names(text: str) -> Iterator[tuple[int, str]]:
    code = CPP_TOKENS.sub(lambda token: " " + "\n" * token[0].count("\n"), text)
    for name in CPP_DEFINED.finditer(code):
        yield code.count("\n", 0, name.start(1)) + 1, name[1]


@cache
def _in_name(name: str) -> tuple[tuple[str, str], ...]:
    """(word, what to write instead). A test's name is a sentence, so prose. Any other is matched word by word."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).strip("_").lower()
    if spaced.startswith("test_") and spaced.count("_") > 3:
        return tuple((f"{word} (in {name})", instead) for _, word, instead in _in_prose(spaced.replace("_", " ")))
    if LOCKS.search(spaced.replace("_", " ")):
        return ()
    return tuple(
        (name, row.instead) for row, pattern in zip(TABLE, NAMES, strict=True) if pattern.search(f"_{spaced}_")
    )


def _in_names(path: Path, text: str) -> Iterator[tuple[int, str, str]]:
    defined = {(1, path.stem)}
    if path.suffix in CPP:
        defined.update(_cpp_names(text))
    elif any(map(_in_name, set(re.findall(r"[A-Za-z_]\w+", text)))):  # parse only if there is something to find
        defined.update(_python_names(ast.parse(text)))
    for line, name in defined:
        if name not in PUBLIC or not re.search(PUBLIC[name], path.as_posix()):
            yield from ((line, word, instead) for word, instead in _in_name(name))


def _in_prose(prose: str) -> Iterator[tuple[int, str, str]]:
    for found in PROSE.finditer(prose):
        row = TABLE[int(str(found.lastgroup)[1:])]
        if found[0].lower() == "held" and LOCKS.search(prose, max(0, found.start() - 60), found.end() + 60):
            continue
        yield prose.count("\n", 0, found.start()) + 1, " ".join(found[0].split()), row.instead


def findings(path: Path, text: str) -> list[tuple[int, str, str]]:
    """(line, word, what to write instead), in the order of lines. `path` is relative to the repository."""
    prose = _prose(path, text)
    if prose is None:
        return []
    lines = text.splitlines()
    found = [one for one in _in_prose(prose) if one[1].lower() != "held" or not LOCKS.search(lines[one[0] - 1])]
    if path.suffix in CPP or path.suffix in PYTHON:
        found += _in_names(path, text)
    return sorted(found)


def main(arguments: list[str]) -> int:
    count = "--count" in arguments
    paths = [argument for argument in arguments if argument != "--count"]
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--", *paths], cwd=None if paths else ROOT, check=True, capture_output=True, text=True
    )
    top = Path.cwd() if paths else ROOT
    folders: Counter[str] = Counter()
    for name in filter(None, listed.stdout.split("\0")):
        path = (top / name).resolve().relative_to(ROOT)
        if SKIPPED.match(path.as_posix()) or not (ROOT / path).is_file():
            continue
        try:
            text = (ROOT / path).read_text()
        except UnicodeDecodeError:
            continue
        for line, word, instead in findings(path, text):
            folders["/".join(path.parts[:2]) if len(path.parts) > 2 else path.parent.as_posix()] += 1
            if not count:
                print(f'{path}:{line}: "{word}": write "{instead}" instead')
    if count:
        for folder, number in sorted(folders.items()):
            print(f"{number:6} {folder}")
        print(f"{folders.total():6} in all")
    return 1 if folders else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
