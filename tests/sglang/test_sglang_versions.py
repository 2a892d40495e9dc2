"""The adapter's first line: the versions of SGLang that kvserver is tested with, and a warning where the engine's is none of them."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import sglang

from kvserver.adapters.sglang.linker import log_versions
from kvserver.adapters.versions import SGLANG


@pytest.mark.parametrize("version", [SGLANG[-1], SGLANG[0] + "+cu130", "0.9.0"])
def test_first_rank_names_the_tested_versions_and_warns_of_an_untested_one(
    version: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sglang, "__version__", version)
    with caplog.at_level(logging.INFO, "kvserver"):
        log_versions(rank=0)
        log_versions(rank=1)
    (record,) = caplog.records
    line = record.getMessage()
    assert all(each in line for each in (*SGLANG, version))
    assert record.levelname == ("WARNING" if version == "0.9.0" else "INFO")
    assert ("never tested" in line) == (version == "0.9.0")


def test_installed_sglang_is_the_newest_tested_version() -> None:
    assert sglang.__version__ == SGLANG[-1]
    requirements = Path(__file__).with_name("requirements.txt").read_text().splitlines()
    assert f"sglang=={SGLANG[-1]}" in requirements
