"""Modules of others in folders of their own, as a package manager would have put them there."""

from __future__ import annotations

from pathlib import Path

import pytest

PLUGINS = "vllm.general_plugins"


def install(
    monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, files: dict[str, str], version: str = "", group: str = ""
) -> None:
    """Write `files`, and let them be found. With a `version` they are a distribution, with a `group` one that has an entry point."""
    write(folder, name, files, version, group)
    monkeypatch.syspath_prepend(str(folder))


def write(folder: Path, name: str, files: dict[str, str], version: str = "", group: str = "") -> None:
    described = {"METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"} if version else {}
    if group:
        described["entry_points.txt"] = f"[{group}]\n{name} = {name}:register\n"
    about = {f"{name}-{version}.dist-info/{path}": text for path, text in described.items()}
    for path, text in (files | about).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
