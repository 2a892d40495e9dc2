"""The connector's first line: the versions of vLLM that kvserver is tested with; a warning where the engine's is none of them."""

from __future__ import annotations

import logging
import os

import pytest
import vllm

from kvserver.adapters.versions import ENGINES, PYTHON_ONLY
from kvserver.cli.checks_service import OLDEST_VLLM


@pytest.fixture
def first_lines(caplog, make_daemon, make_engine):
    """Those of an engine's start that name the versions."""
    caplog.set_level(logging.INFO, "vllm.kvserver")
    make_engine(make_daemon())
    return [(r.levelname, r.getMessage()) for r in caplog.records if "is tested with" in r.getMessage()]


@pytest.fixture(params=["99.0.0", ENGINES[0] + "+cu130", PYTHON_ONLY[-1]])
def version(request, monkeypatch):
    monkeypatch.setattr(vllm, "__version__", request.param)
    return request.param


def test_first_line_names_the_tested_versions_and_warns_of_an_untested_one(version, first_lines):
    ((level, line),) = first_lines
    assert all(each in line for each in (*ENGINES, *PYTHON_ONLY, version))
    untested = version == "99.0.0"
    assert level == ("WARNING" if untested else "INFO")
    assert ("never tested" in line) == untested


def test_doctor_calls_vllm_too_old_below_the_oldest_tested_version():
    assert ".".join(map(str, OLDEST_VLLM)) == ENGINES[0]


def test_installed_vllm_is_the_version_under_test():
    """`tests/versions/run.py` names it; else it is the newest of which there are real engines."""
    assert vllm.__version__.split("+")[0] == os.environ.get("KVSERVER_TEST_VLLM", ENGINES[-1])
