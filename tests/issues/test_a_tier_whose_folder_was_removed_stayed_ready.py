"""A file tier whose folder was removed or replaced stayed ready, and wrote what no restart would find. One whose opening hung let /readyz succeed."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path

import pytest
from support.file_tiers import FaultyDisk, FileRig, SmallL1, name_of

from kvserver.l2.files import tier as file_tier


@pytest.fixture
def rig(tmp_path: Path):
    made = FileRig(tmp_path / "tier", l1=SmallL1(64)).opened()
    yield made
    made.close()


def tick_until(rig: FileRig, state: str) -> None:
    def reached() -> bool:
        rig.tier.tick(time.monotonic_ns())
        return rig.tier.state == state

    rig.until(reached)


@pytest.mark.parametrize("lost", ["tier", "tier/data"])
def test_tier_with_a_removed_folder_or_file_is_unavailable_until_it_is_back(
    tmp_path: Path, rig: FileRig, lost: str
) -> None:
    rig.put(name_of(1), 5000)
    (tmp_path / lost).rename(tmp_path / "moved")
    tick_until(rig, "unavailable")
    assert "is no longer there" in rig.tier.failure
    assert rig.holds(1) == []
    (tmp_path / "moved").rename(tmp_path / lost)
    tick_until(rig, "ready")
    assert rig.holds(1) == [1]


def test_tier_with_a_replaced_folder_is_unavailable(tmp_path: Path, rig: FileRig) -> None:
    shutil.rmtree(tmp_path / "tier")
    (tmp_path / "tier").mkdir()
    tick_until(rig, "unavailable")
    assert "was replaced" in rig.tier.failure


def test_an_opening_that_hangs_is_unavailable_until_it_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_tier, "_STALLED_SECONDS", -1.5)  # half a second with the time-out
    opens = threading.Event()

    class Hanging(FaultyDisk):
        def open(self, name: str, flags: int, folder: int) -> int:
            assert name != "generations" or opens.wait(30)
            return super().open(name, flags, folder)

    rig = FileRig(tmp_path / "tier", disk=Hanging(), l1=SmallL1(64))
    tick_until(rig, "unavailable")
    assert "has not ended" in rig.tier.failure
    opens.set()
    tick_until(rig, "ready")
    rig.close()


def test_a_required_tier_that_is_configured_read_only_lets_the_daemon_be_ready(make_daemon, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/t?size=32MiB&required=true"
    daemon = make_daemon(l2=url)
    assert daemon.http("/readyz")[0] == 200
    assert daemon.terminate() == 0
    reader = make_daemon(l2=f"{url}&read_only=true")
    assert reader.tier()["state"] == "read_only"
    assert reader.http("/readyz") == (200, "ready\n")
