"""A `generations` file that was restored, or lost, alone: what had been cleared was found again, or all was lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.file_tiers import NAMESPACE, FileRig, name_of

from kvserver.l2 import TierOutcome
from kvserver.l2.files import generations

DONE = TierOutcome.DONE


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A tier with object 1 that was cleared, and object 2 that was not; `old`: the file of before the clear."""
    rig = FileRig(tmp_path / "tier").opened()
    rig.put(name_of(1), 5000)
    (tmp_path / "old").write_bytes((tmp_path / "tier/generations").read_bytes())
    assert rig.clear(NAMESPACE) is DONE
    rig.put(name_of(2), 5000)
    rig.written()
    yield tmp_path / "tier"
    rig.close()


def holds(folder: Path, copy: Path) -> list[int]:
    """What a daemon finds that starts with these files now, and one that starts after it."""
    copy.mkdir(0o700)
    for path in folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    found = []
    for _ in range(2):
        rig = FileRig(copy).opened()
        found.append(rig.holds(1, 2))
        rig.close()
    assert found[0] == found[1]
    assert (copy / "generations").read_bytes() == (copy / "generations.copy").read_bytes(), "each is a copy again"
    return found[0]


@pytest.mark.parametrize("name", ["generations", "generations.copy"])
@pytest.mark.parametrize("fate", ["restored", "lost", "damaged"])
def test_one_file_of_generations_is_enough(folder: Path, tmp_path: Path, name: str, fate: str) -> None:
    if fate == "restored":
        (folder / name).write_bytes((tmp_path / "old").read_bytes())
    elif fate == "lost":
        (folder / name).unlink()
    else:
        raw = (folder / name).read_bytes()
        (folder / name).write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    assert holds(folder, tmp_path / "next") == [2]


def test_generations_only_grow() -> None:
    known = generations.FolderGenerations()
    for prefix in (NAMESPACE, b"other", NAMESPACE, b"", NAMESPACE):
        last = known.last
        known.clear(prefix)
        assert known.of(prefix) == known.last > last
    found = generations.decode(known.encode())
    assert found is not None
    assert found.last == known.last
