"""Writing files so that a reader, or a crash at any moment, sees the whole old or the whole new content.

The content goes to a file beside, is flushed to the disk, and takes the name in one step. What a user expects of plain
``open(path, "w")`` holds too: the permissions are those of the file that is replaced, or what the umask leaves to a new
one; a symbolic link keeps pointing to the file, which is replaced; a device or a pipe is written to and stays.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path


def write_whole(target: Path, data: bytes) -> None:
    """Writes a file, all of it or nothing; OSError where that is impossible."""
    if target.exists() and not target.is_file() and not target.is_dir():
        target.write_bytes(data)
        return
    with replacing(target) as beside:
        beside.write_bytes(data)


@contextlib.contextmanager
def replacing(target: Path, suffix: str = "") -> Iterator[Path]:
    """A new file beside ``target`` to write to; it takes the name at the end, or goes away if an exception comes.

    Args:
        target: need not exist.
        suffix: of the new file's name, for writers that look at it.
    """
    final = Path(os.path.realpath(target))
    beside = final.with_name(f".{final.name}.{secrets.token_hex(4)}{suffix}")
    descriptor = os.open(beside, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)  # less the umask
    os.close(descriptor)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.chmod(beside, final.stat().st_mode & 0o777)
        yield beside
        take_place(beside, final)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def take_place(beside: Path, final: Path) -> None:
    """The new file, once it has reached the disk, takes the name of the old one in one step."""
    _to_disk(beside)
    os.replace(beside, final)
    if os.name == "posix":  # the renaming itself reaches the disk
        _to_disk(final.parent)


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
