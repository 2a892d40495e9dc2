"""`kvserver doctor` looked only at the tiers of its own flags: without them it reported no storage beside a daemon that had some."""

from __future__ import annotations

import pytest
from support.doctor import flags, rows


@pytest.fixture
def daemon(make_daemon, tmp_path):
    return make_daemon(l2=f"file://{tmp_path}/used?size=16MiB")


def test_without_flags_the_tiers_of_the_daemon_that_runs_are_reported(daemon, tmp_path):
    _, found = rows(*flags(daemon))
    assert (found["storage"]["level"], found["storage"]["text"]) == (
        "ok",
        f"the daemon's file://{tmp_path}/used: ready",
    )


def test_flags_that_name_other_tiers_are_a_warning(daemon, tmp_path):
    _, found = rows(*flags(daemon), "--l2", f"file://{tmp_path}/planned?size=16MiB")
    assert found["storage"]["level"] == "warning"
    assert "the daemon that runs has other tiers than these flags" in found["storage"]["text"]
    assert f"file://{tmp_path}/planned: " in found["storage"]["text"], "the planned one is looked at, too"
    _, found = rows(*flags(daemon), "--l2", f"file://{tmp_path}/used?size=16MiB")
    assert "other tiers" not in found["storage"]["text"]
