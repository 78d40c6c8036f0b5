"""Spill files: where weights go that no file of the user's holds.

A store owns a private folder (mode 0700) named after its process; files in it have mode 0600, are written whole under a
temporary name and renamed, and go when the last block that they back lets go of them. Folders of processes that are
dead are swept when a store is opened. Sizes are bytes. Takes no lock; refuses to know what the bytes are.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
import tempfile
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path

import psutil

from vram_magic.residency.checkpoint import FileIdentity, WeightFile
from vram_magic.sizes import format_size

__all__ = ["SpillStore", "default_spill_root"]

_ALIGN = 64
_DISK_RESERVE_BYTES, _DISK_RESERVE_FRACTION = 1 << 30, 0.05
_numbers = itertools.count()


def default_spill_root() -> Path:
    """``VRAM_MAGIC_SPILL_DIR``, else ``/var/tmp`` (a disk, where ``/tmp`` often is RAM), else the temporary folder."""
    named = os.environ.get("VRAM_MAGIC_SPILL_DIR")
    if named:
        return Path(named)
    return Path("/var/tmp") if os.access("/var/tmp", os.W_OK) else Path(tempfile.gettempdir())  # noqa: S108


class SpillStore:
    """Spill files of one manager."""

    def __init__(self, root: Path | None = None) -> None:
        self._base = (root or default_spill_root()) / f"vram_magic-{os.getuid()}"
        self._folder: Path | None = None
        self._removal: weakref.finalize[..., object] | None = None
        self._pid = os.getpid()

    def open(self) -> None:
        """Sweeps what dead processes left."""
        with contextlib.suppress(OSError):
            for folder in self._base.iterdir():
                if not _alive(folder.name):
                    shutil.rmtree(folder, ignore_errors=True)

    @property
    def folder(self) -> Path:
        if self._folder is None or not self._folder.is_dir():  # somebody may tidy up temporary folders
            self._base.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self._base.stat().st_uid != os.getuid():
                raise PermissionError(errno.EPERM, "the spill folder belongs to somebody else", str(self._base))
            folder = self._base / f"{self._pid}-{_started(self._pid)}-{next(_numbers)}"
            folder.mkdir(mode=0o700)
            self._folder = folder
            self._removal = weakref.finalize(self, _remove_folder, folder, self._pid)  # at the kernel's end, too
        return self._folder

    def write(self, parts: Sequence[tuple[int, Iterable[memoryview]]]) -> tuple[WeightFile, list[int]]:
        """A new file with the parts, each given as its size and its pieces; returns it and the offset of each.

        Raises OSError and leaves nothing when it cannot.
        """
        offsets = _offsets([size for size, _ in parts])
        total = offsets[-1] + parts[-1][0]
        self._check_disk(total)
        path = self.folder / f"{next(_numbers)}.weights"
        temporary = path.with_suffix(".partial")
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, total)  # a full disk shows before anything is written
            for (_, pieces), offset in zip(parts, offsets, strict=True):
                _write(fd, pieces, offset)
            os.replace(temporary, path)
        except BaseException:
            os.close(fd)
            temporary.unlink(missing_ok=True)
            raise
        return self._owned(path, fd), offsets

    def close(self) -> None:
        """Removes the folder. Mappings of its files stay valid until they go."""
        if self._removal is not None:
            self._removal()
            self._folder = self._removal = None

    def used_bytes(self) -> int:
        """Bytes of disk that the files take."""
        if self._folder is None:
            return 0
        with contextlib.suppress(OSError):
            return sum(file.stat().st_size for file in self._folder.iterdir())
        return 0

    def _owned(self, path: Path, fd: int) -> WeightFile:
        file = WeightFile(path, fd, FileIdentity.of(fd))
        weakref.finalize(file, _remove, path, self._pid).atexit = False  # `close` removes the folder then
        return file

    def _check_disk(self, size_bytes: int) -> None:
        disk = shutil.disk_usage(self.folder)
        reserve = min(_DISK_RESERVE_BYTES, int(disk.total * _DISK_RESERVE_FRACTION))
        if disk.free - size_bytes < reserve:
            raise OSError(
                errno.ENOSPC,
                f"the disk has {format_size(disk.free)} free, {format_size(size_bytes)} are to be spilled and "
                f"{format_size(reserve)} stay reserved",
                str(self.folder),
            )


def _remove_folder(folder: Path, pid: int) -> None:
    if os.getpid() == pid:  # a forked child must not take them away
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            folder.parent.rmdir()


_undead: deque[Path] = deque()
"""Files that could not be removed: somebody has them open, where that forbids it."""


def _remove(path: Path, pid: int) -> None:
    """Removes a file, and those that could not be before. Called by a finalizer, so it neither raises nor waits."""
    if os.getpid() != pid:
        return
    again = []
    with contextlib.suppress(IndexError):  # another thread, or a finalizer in the middle of this, has taken the last
        _undead.append(path)
        while True:
            path = _undead.popleft()
            try:
                path.unlink(missing_ok=True)
            except OSError:
                again.append(path)
    _undead.extend(again)


def _offsets(sizes: list[int]) -> list[int]:
    ends = itertools.accumulate((-(-size // _ALIGN) * _ALIGN for size in sizes), initial=0)
    return list(ends)[:-1]


def _write(fd: int, pieces: Iterable[memoryview], offset: int) -> None:
    for piece in pieces:
        done = 0
        while done < len(piece):
            done += os.pwrite(fd, piece[done:], offset + done)
        offset += len(piece)


def _started(pid: int) -> int:
    """A process's start time, in centiseconds: a pid alone comes back."""
    return int(psutil.Process(pid).create_time() * 100)


def _alive(name: str) -> bool:
    try:
        pid, started, _ = (int(part) for part in name.split("-"))
    except ValueError:
        return True  # not ours: leave it
    try:
        return abs(_started(pid) - started) <= 100  # boot time is re-read, and drifts a little
    except psutil.Error:
        return False
