"""README and three error messages had `pip install 'kvserver[...]'`, and PyPI has no package of that name. Who registers it there
runs code beside all prompts of those who follow the text. Until kvserver is published every text installs from a checkout or a wheel.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("kvserver", "adapters", "deploy", "bench", "findings", "csrc", ".ci")
_COMMAND = re.compile(r"(?:pip3?|pipx|uv tool) install ([^|;&`]*)")
_OF_PYPI = re.compile(r"kvserver(\[[^]]*\])?([=<>~!].*)?")
_EXTRA = re.compile(r"kvserver\[(valkey|s3|mooncake)")


def texts() -> Iterator[Path]:
    yield from (ROOT / name for name in ("README.md", "CHANGELOG.md", "Makefile", "pyproject.toml"))
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and path.suffix not in (".png", ".so", ".pyc", ".json"):
                yield path


def named(text: str) -> list[str]:
    """Commands that would get kvserver from PyPI."""
    one_line = re.sub(r'["\'\\\s]+', " ", text)  # also of a string of several parts
    found = [f"{match[0]} ..." for match in _EXTRA.finditer(one_line)]
    for match in _COMMAND.finditer(one_line):
        words = match[1].split()[:12]
        if "--no-index" not in words and any(_OF_PYPI.fullmatch(word.rstrip(".,:)")) for word in words[:4]):
            found.append(match[0][:80])
    return found


@pytest.mark.parametrize(
    "text",
    ["`pip install kvserver`", "run: pip install 'kvserver[s3]', or", '"pip install"\n    " kvserver==0.1.0"', "uv pip install -U kvserver"],
)  # fmt: skip
def test_a_command_that_would_ask_pypi_is_found(text: str) -> None:
    """So that the test below may fail."""
    assert named(text)


def test_no_text_installs_kvserver_from_pypi() -> None:
    found = {str(path.relative_to(ROOT)): named(path.read_text(errors="replace")) for path in texts()}
    assert len(found) > 300
    assert {path: commands for path, commands in found.items() if commands} == {}


@pytest.mark.parametrize("kind", ["valkey", "s3", "mooncake"])
def test_the_error_for_a_missing_client_installs_what_the_extra_has(kind: str) -> None:
    (package,) = re.findall(rf'^{kind} = \["([\w-]+)', (ROOT / "pyproject.toml").read_text(), re.M)
    assert f"pip install {package}" in (ROOT / f"kvserver/l2/remote/{kind}.py").read_text()
