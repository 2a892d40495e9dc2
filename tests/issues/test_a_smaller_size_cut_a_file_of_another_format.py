"""A daemon with a smaller `size` cut a data file before it read the format, and a `size` beyond 4 TiB emptied a tier without a word."""

from __future__ import annotations

import logging
import struct
from pathlib import Path

import pytest
from support.file_tiers import PAGE, FileRig, SmallL1, name_of

from kvserver.l2 import TierOutcome
from kvserver.protocol import ConfigError

RECORDS = 100


def rig_of(folder: Path, size: str) -> FileRig:
    return FileRig(folder / "tier", size=size, l1=SmallL1(64, fragmented=False))


def filled(folder: Path, size: str = "2MiB") -> None:
    rig = rig_of(folder, size).opened()
    assert {rig.put(name_of(number), PAGE) for number in range(RECORDS)} == {TierOutcome.DONE}
    rig.written().close()


def found(folder: Path, size: str) -> int:
    rig = rig_of(folder, size).opened()
    try:
        return len([number for number in range(RECORDS) if rig.get(name_of(number), PAGE) is TierOutcome.DONE])
    finally:
        rig.close()


@pytest.mark.parametrize("name", ["data", "journal", "generations"])
def test_a_smaller_size_leaves_files_of_a_later_format_as_they_are(tmp_path: Path, name: str) -> None:
    filled(tmp_path)
    with (tmp_path / "tier" / name).open("r+b") as file:
        file.seek(8)
        file.write(struct.pack("<I", 9))
    before = {path.name: path.read_bytes() for path in (tmp_path / "tier").iterdir()}
    if name == "data":
        with pytest.raises(ConfigError, match="its data file has format 9"):
            rig_of(tmp_path, "1MiB")
    else:
        rig = rig_of(tmp_path, "1MiB").opened()
        assert (rig.tier.state, "has format 9" in rig.tier.failure) == ("closed", True)
        rig.close()
    assert {path.name: path.read_bytes() for path in (tmp_path / "tier").iterdir()} == before


def test_a_smaller_size_that_cannot_be_had_leaves_the_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path)
    before = (tmp_path / "tier/data").read_bytes()
    monkeypatch.setattr("kvserver.l2.files.folder._LEAST_SPARE_BYTES", 1 << 62)  # more than any disk has
    with pytest.raises(ConfigError, match="could not be had"):
        rig_of(tmp_path, "1MiB")
    assert (tmp_path / "tier/data").read_bytes() == before


def test_a_smaller_size_keeps_the_larger_pages_of_the_file_and_so_its_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Larger pages as of a tier of more than 4 TiB, in small."""
    with monkeypatch.context() as patch:
        patch.setattr("kvserver.cache.pages.MAX_PAGES", 256)
        filled(tmp_path)
    size = (tmp_path / "tier/data").stat().st_size
    assert found(tmp_path, "2000KiB") == RECORDS
    assert (tmp_path / "tier/data").stat().st_size < size


def test_a_size_that_needs_larger_pages_empties_the_tier_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    filled(tmp_path)
    assert found(tmp_path, "2MiB") == RECORDS
    assert not caplog.records
    monkeypatch.setattr("kvserver.cache.pages.MAX_PAGES", 256)
    with caplog.at_level(logging.WARNING):
        assert found(tmp_path, "2MiB") == 0
    (record,) = caplog.records
    assert "needs pages of 16384 bytes and its file has pages of 4096: the tier begins empty" in record.getMessage()
    assert "/tier" in record.getMessage()
