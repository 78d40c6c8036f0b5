"""Proof that bytes are the same: a 128-bit xxh3 hash.

Version counters miss writes through ``.data``, and linear checksums miss sign flips and swapped rows; a real hash
misses nothing that happens by accident, and runs near memory speed. Bytes come in pieces, so that memory which the
processor cannot reach is hashed on its way through a small buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import xxhash

from vram_magic.devices.base import PIECE_BYTES
from vram_magic.residency.checkpoint import WeightFile

__all__ = ["Digesting", "digest", "digest_file"]


def digest(pieces: Iterable[memoryview]) -> int:
    """The hash of the bytes."""
    state = xxhash.xxh3_128()
    for piece in pieces:
        state.update(piece)
    return state.intdigest()


def digest_file(file: WeightFile, offset: int, size_bytes: int) -> int:
    """The hash of bytes in a file, read through one small buffer. Raises `BackingLostError`."""
    state, buffer = xxhash.xxh3_128(), memoryview(bytearray(min(size_bytes, PIECE_BYTES)))
    for start in range(0, size_bytes, PIECE_BYTES):
        piece = buffer[: min(PIECE_BYTES, size_bytes - start)]
        file.read_into(piece, offset + start)
        state.update(piece)
    return state.intdigest()


class Digesting:
    """Hashes bytes while they are copied, in their order."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()

    @property
    def value(self) -> int:
        return self._state.intdigest()

    def passing(self, pieces: Iterable[memoryview]) -> Iterator[memoryview]:
        """The pieces, hashed on the way."""
        for piece in pieces:
            self._state.update(piece)
            yield piece

    def from_file(self, file: WeightFile, offset: int) -> Callable[[memoryview, int], None]:
        """Fills pieces of a copy from the file. Raises `BackingLostError`."""

        def fill(piece: memoryview, start: int) -> None:
            file.read_into(piece, offset + start)
            self._state.update(piece)

        return fill

    def from_ram(self, source: memoryview) -> Callable[[memoryview, int], None]:
        """Fills pieces of a copy from RAM."""

        def fill(piece: memoryview, start: int) -> None:
            piece[:] = source[start : start + len(piece)]
            self._state.update(piece)

        return fill
