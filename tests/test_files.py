"""Files are replaced whole, and otherwise as plain ``open`` would write them: permissions, links, devices."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from autoshard_ilp.files import replacing, write_whole


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_file_has_the_permissions_that_the_umask_leaves(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_whole(tmp_path / "new", b"1")
    finally:
        os.umask(before)
    assert mode(tmp_path / "new") == 0o640


def test_a_replaced_file_keeps_its_permissions(tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.write_bytes(b"0")
    old.chmod(0o604)
    write_whole(old, b"1")
    assert (old.read_bytes(), mode(old)) == (b"1", 0o604)


def test_a_symbolic_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    link = tmp_path / "link"
    link.symlink_to(Path("folder") / "real")
    write_whole(link, b"1")
    assert link.is_symlink()
    assert (tmp_path / "folder" / "real").read_bytes() == b"1"
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["folder", "link", "real"]


def test_a_pipe_is_written_to_and_stays(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_whole(pipe, b"1")
        assert os.read(reader, 2) == b"1"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_failure_leaves_the_old_file_alone(tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.write_bytes(b"0")
    with pytest.raises(RuntimeError), replacing(old) as beside:
        beside.write_bytes(b"half")
        raise RuntimeError
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("old", b"0")]


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="directory"):
        write_whole(tmp_path / "folder", b"1")
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]
