"""A file of the disk's tier is whole and ours, or it is not used."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_dsv4.offload import files
from vllm_dsv4.offload.disk import ABANDONED_SECONDS, DiskFolder, stage_path
from vllm_dsv4.offload.files import TEMPORARY, BadFileError

KEY, OURS, OTHERS = b"p" + bytes(range(32)), b"n" * 16, b"o" * 16
CONTENT = [bytes(range(250)) * 3, b"", b"end"]


def buffers(parts: list[bytes]) -> list[memoryview]:
    return [memoryview(bytearray(part)) for part in parts]


def read_back(path: Path, key: bytes = KEY, name_space: bytes = OURS) -> list[bytes]:
    found = buffers([bytes(len(part)) for part in CONTENT])
    files.read(path, key, name_space, found)
    return [bytes(part) for part in found]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "aa" / "piece"
    files.write(path, KEY, OURS, buffers(CONTENT))
    return path


def test_what_was_written_is_read(path: Path) -> None:
    assert read_back(path) == CONTENT
    assert [found.name for found in path.parent.iterdir()] == ["piece"]


def test_every_flipped_byte_is_seen(path: Path) -> None:
    whole = path.read_bytes()
    for place in range(0, len(whole), 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(BadFileError):
            read_back(path)


def test_every_cut_is_seen_and_what_is_too_long(path: Path) -> None:
    whole = path.read_bytes()
    for end in (0, 1, 60, 100, len(whole) - 8, len(whole) - 1):
        path.write_bytes(whole[:end])
        with pytest.raises(BadFileError):
            read_back(path)
    path.write_bytes(whole + b"x")
    with pytest.raises(BadFileError):
        read_back(path)


def test_another_name_space_and_another_key_are_seen(path: Path) -> None:
    with pytest.raises(BadFileError):
        read_back(path, name_space=OTHERS)
    with pytest.raises(BadFileError):
        read_back(path, key=b"s" + KEY[1:])


def test_a_failing_disk_leaves_neither_a_file_nor_a_part_of_one(tmp_path: Path) -> None:
    path = tmp_path / "aa" / "piece"
    path.parent.mkdir()
    path.mkdir()  # a rename onto a folder fails when all is written
    with pytest.raises(OSError, match=r"."):
        files.write(path, KEY, OURS, buffers(CONTENT))
    assert [found.name for found in path.parent.iterdir()] == ["piece"]


def put(folder: DiskFolder, key: bytes, nbytes: int = 100) -> None:
    for stage in range(folder.stages):
        files.write(stage_path(folder.path(key), stage), key, OURS, [memoryview(bytearray(nbytes))])


def key(number: int) -> bytes:
    return b"p" + number.to_bytes(32)


def test_a_folder_is_found_again_and_by_others(tmp_path: Path) -> None:
    folder = DiskFolder(tmp_path, 1 << 20, stages=1)
    put(folder, key(1))
    folder.written(key(1))
    again = DiskFolder(tmp_path, 1 << 20, stages=1)
    assert key(1) in again
    assert again.used_bytes == folder.used_bytes > 100
    put(again, key(2))
    assert key(2) in folder


def test_a_piece_counts_if_all_stages_have_it(tmp_path: Path) -> None:
    folder = DiskFolder(tmp_path, 1 << 20, stages=2)
    put(folder, key(1))
    put(folder, key(2))
    stage_path(folder.path(key(2)), 1).unlink()
    for seen in (folder, DiskFolder(tmp_path, 1 << 20, stages=2)):
        assert key(1) in seen
        assert key(2) not in seen


def test_the_least_recently_used_files_make_room(tmp_path: Path) -> None:
    folder = DiskFolder(tmp_path, 600, stages=1)
    for number in range(3):
        put(folder, key(number))
        folder.written(key(number))
    folder.touch([key(0)])
    folder.spend(key(2))
    put(folder, key(3))
    folder.written(key(3))
    assert folder.used_bytes <= 600
    assert not folder.path(key(2)).with_name(f"{folder.path(key(2)).name}.0").exists()
    assert key(0) in folder and key(3) in folder


def test_what_a_killed_server_left_is_removed_when_it_is_old(tmp_path: Path) -> None:
    import os
    import time

    (tmp_path / "aa").mkdir()
    old, young = (tmp_path / "aa" / f"{name}{TEMPORARY}" for name in ("old", "young"))
    for part in (old, young):
        part.write_bytes(b"half")
    then = time.time() - ABANDONED_SECONDS - 1
    os.utime(old, (then, then))
    folder = DiskFolder(tmp_path, 1 << 20, stages=1)
    assert not old.exists()
    assert young.exists()
    assert folder.used_bytes == 0


def test_a_full_disk_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    import logging

    logging.getLogger("vllm").propagate = True
    folder = DiskFolder(tmp_path, 1 << 20, stages=1)
    with caplog.at_level("ERROR"):
        folder.stop_writing("No space left on device")
        folder.stop_writing("No space left on device")
    assert not folder.is_writable
    assert len([r for r in caplog.records if "No space left" in r.getMessage()]) == 1
