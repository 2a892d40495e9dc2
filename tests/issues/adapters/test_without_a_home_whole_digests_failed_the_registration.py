"""Digests of whole files are remembered in the user's cache. A user without a home folder, as in containers with a uid of their own, got
a RuntimeError of `Path.home()`, and the engine never registered."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvserver.adapters.common.weights import file_digest


def test_without_a_home_nothing_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    file = tmp_path / "model.bin"
    file.write_bytes(b"weights")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    expected = file_digest(file, whole=True)
    other = tmp_path / "copy.bin"
    other.write_bytes(b"weights")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    assert file_digest(other, whole=True) == expected
