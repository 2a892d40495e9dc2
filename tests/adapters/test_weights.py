"""Weights count by their content: not by names of folders, nor by times of files."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from model_folder import write_model, write_weights

from kvserver.adapters.common import weights
from kvserver.adapters.common.weights import NoWeights, folder_digest

SIZES = {"small": 10, "large": 100_000, "after": 3_000}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_weights(tmp_path / "model" / "model.safetensors", SIZES)
    return tmp_path / "model"


def poke(path: Path, at: int) -> None:
    """Change one byte; size and mtime stay."""
    stat = path.stat()
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_a_copy_with_other_times_is_the_same(folder: Path) -> None:
    copy = shutil.copytree(folder, folder.with_name("copy"))
    os.utime(copy / "model.safetensors")
    assert folder_digest(copy) == folder_digest(folder)


@pytest.mark.parametrize("tensor", SIZES)
@pytest.mark.parametrize("place", [0.0, 0.5, 1.0])
def test_a_byte_at_either_end_or_in_the_middle_of_any_tensor_counts(folder: Path, tensor: str, place: float) -> None:
    """Though size and mtime are those of before, and the file was read already."""
    before = folder_digest(folder)
    path = folder / "model.safetensors"
    end = path.stat().st_size - sum(SIZES.values())
    for name, size in SIZES.items():
        begin, end = end, end + size
        if name == tensor:
            poke(path, begin + int(place * (size - 1)))
    assert folder_digest(folder) != before


@pytest.mark.parametrize(
    "tensors", [{"small": 10, "large": 100_000, "renamed": 3_000}, {"small": 13, "large": 100_000, "after": 2_997}]
)
def test_names_and_shapes_of_tensors_count(folder: Path, tensors: dict[str, int]) -> None:
    before = folder_digest(folder)
    write_weights(folder / "model.safetensors", tensors)
    assert folder_digest(folder) != before


def test_types_of_tensors_count(folder: Path) -> None:
    before = folder_digest(folder)
    write_weights(folder / "model.safetensors", SIZES, dtype="I8")
    assert folder_digest(folder) != before


@pytest.mark.parametrize(
    "name",
    ["model-2.safetensors", "pytorch_model.bin", "hf_quant_config.json", "preprocessor_config.json", "modeling.py"],
)
def test_another_file_that_vllm_may_read_counts(folder: Path, name: str) -> None:
    before = folder_digest(folder)
    (folder / name).write_bytes(b"{}")
    assert folder_digest(folder) != before


@pytest.mark.parametrize(
    "name", ["README.md", "config.json", "tokenizer.json", "generation_config.json", ".git/x.json"]
)
def test_digest_of_weights_ignores_files_without_weights(folder: Path, name: str) -> None:
    before = folder_digest(folder)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(b"{}")
    assert folder_digest(folder) == before


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.gguf", "broken.safetensors"])
def test_digest_of_other_formats_covers_pieces_all_through_the_file(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(bytes(5_000_000))
    found = {folder_digest(tmp_path)}
    for at in (0, 1_249_999, 2_500_000, 4_999_999):
        for near in range(at - 600, at + 601, 100):  # wherever the pieces are, one of these is in one
            if 0 <= near < 5_000_000:
                poke(path, near)
        found.add(folder_digest(tmp_path))
    assert len(found) == 5


def test_safetensors_that_lie_about_their_tensors_are_read_as_any_file(tmp_path: Path) -> None:
    header = b'{"w": {"dtype": "U8", "shape": [9], "data_offsets": [0, 99999999]}}'
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"123456789")
    before = folder_digest(tmp_path)
    poke(path, path.stat().st_size - 1)
    assert folder_digest(tmp_path) != before


def test_a_file_that_did_not_change_is_read_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda *arguments: (reads.append(1), pread(*arguments))[1])
    before = folder_digest(folder)
    count = len(reads)
    assert (folder_digest(folder), len(reads)) == (before, count)
    assert count >= len(SIZES)
    poke(folder / "model.safetensors", 200)
    folder_digest(folder)
    assert len(reads) > count


def test_a_folder_without_weights_has_no_digest(tmp_path: Path) -> None:
    (write_model(tmp_path) / "model.safetensors").unlink()
    with pytest.raises(NoWeights, match="no weight files"):
        folder_digest(tmp_path)


# ---- every byte ---------------------------------------------------------------------------------


@pytest.fixture
def remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where whole digests are kept for other processes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kvserver" / "weights"


def as_another_process() -> None:
    weights._whole_digest.cache_clear()


def test_every_byte_counts_of_a_whole_digest(folder: Path, remembered: Path) -> None:
    path = folder / "model.safetensors"
    at = path.stat().st_size - SIZES["after"] - SIZES["large"] // 4  # between two samples
    samples, before = folder_digest(folder), folder_digest(folder, whole=True)
    poke(path, at)
    assert folder_digest(folder) == samples
    assert folder_digest(folder, whole=True) != before
    poke(path, at)
    assert folder_digest(folder, whole=True) == before


def test_a_whole_digest_is_read_once_for_all_processes(folder: Path, remembered: Path) -> None:
    before = folder_digest(folder, whole=True)
    (kept,) = remembered.iterdir()
    assert remembered.stat().st_mode & 0o077 == 0
    as_another_process()
    assert folder_digest(folder, whole=True) == before
    kept.write_text("1" * 64)
    as_another_process()
    assert folder_digest(folder, whole=True) != before, "what was kept is used"
    kept.write_text("damaged")
    as_another_process()
    assert folder_digest(folder, whole=True) == before


def test_a_whole_digest_needs_no_place_to_be_kept(folder: Path, remembered: Path) -> None:
    before = folder_digest(folder, whole=True)
    shutil.rmtree(remembered.parent.parent)
    remembered.parent.parent.write_text("a file, where a folder should be")
    as_another_process()
    assert folder_digest(folder, whole=True) == before


def test_a_file_that_changes_while_it_is_read_has_no_digest(
    folder: Path, remembered: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / "model.safetensors"
    stamp = weights.stamp_of(path)
    stamps = iter([stamp, stamp._replace(ctime_ns=stamp.ctime_ns + 1)])
    monkeypatch.setattr(weights, "stamp_of", lambda path: next(stamps))
    with pytest.raises(OSError, match="changed"):
        weights.file_digest(path, whole=True)
    assert not remembered.exists()
