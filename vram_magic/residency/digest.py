"""Proof that bytes are the same: a 128-bit xxh3 hash.

Version counters miss writes through ``.data``, and linear checksums miss sign flips and swapped rows; a real hash
misses nothing that happens by accident, and runs near memory speed.
"""

from __future__ import annotations

import xxhash

from vram_magic.residency.checkpoint import WeightFile

__all__ = ["digest", "digest_file", "read_digested"]

_CHUNK_BYTES = 16 << 20  # hashed while it is still in the processor's cache


def digest(memory: memoryview) -> int:
    """The hash of the bytes."""
    return xxhash.xxh3_128_intdigest(memory)


def read_digested(file: WeightFile, offset: int, memory: memoryview) -> int:
    """Fills ``memory`` from the file and returns the hash of what was read. Raises `BackingLostError`."""
    state = xxhash.xxh3_128()
    for start in range(0, len(memory), _CHUNK_BYTES):
        chunk = memory[start : start + _CHUNK_BYTES]
        file.read_into(chunk, offset + start)
        state.update(chunk)
    return state.intdigest()


def digest_file(file: WeightFile, offset: int, size_bytes: int) -> int:
    """The hash of bytes in a file, read through one small buffer."""
    state, buffer = xxhash.xxh3_128(), memoryview(bytearray(min(size_bytes, _CHUNK_BYTES)))
    for start in range(0, size_bytes, _CHUNK_BYTES):
        chunk = buffer[: min(_CHUNK_BYTES, size_bytes - start)]
        file.read_into(chunk, offset + start)
        state.update(chunk)
    return state.intdigest()
