"""A checkpoint: where each tensor of a set of safetensors files lies on disk, in bytes.

The parts: a `WeightFile` is one open file, a `TensorRange` the bytes of one tensor in it, a `Checkpoint`
the ranges of all tensors by name, from one file or from the shards that an index names. We parse the
headers ourselves, because the safetensors library tells no offsets; nothing but headers is read.

`Checkpoint.open` validates everything before it returns: a missing, short or foreign shard, or one that
the index does not describe, is a `SourceError`. Readers that skip this leave random weights behind.

All offsets and sizes are bytes, counted from the start of the file. No locks: everything is immutable,
and `os.preadv` carries its own offset. Refuses to know torch, models and who reads the ranges.
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
import weakref
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from vram_magic.errors import BackingLostError, SourceError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

__all__ = ["Checkpoint", "FileIdentity", "TensorRange", "WeightFile", "odd_kind", "some_of", "torch_dtype_name"]

INDEX_SUFFIX = ".safetensors.index.json"
CHUNK_BYTES = 16 * 2**20  # one preadv: large enough for the medium, small enough for an interrupt to get in
LENGTH_BYTES = 8  # a file begins with the length of its header, little-endian
MAX_HEADER_BYTES = 100_000_000  # the safetensors library's own limit

# What a folder may hold besides (adapters, consolidated copies, variants) does not count beside these.
_CANONICAL_STEMS = ("model", "diffusion_pytorch_model")

# safetensors name -> (torch name, bytes per element)
_DTYPES: Mapping[str, tuple[str, int]] = {
    "BOOL": ("bool", 1),
    "U8": ("uint8", 1),
    "I8": ("int8", 1),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1),
    "U16": ("uint16", 2),
    "I16": ("int16", 2),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "U32": ("uint32", 4),
    "I32": ("int32", 4),
    "F32": ("float32", 4),
    "U64": ("uint64", 8),
    "I64": ("int64", 8),
    "F64": ("float64", 8),
    "C64": ("complex64", 8),
}


def torch_dtype_name(safetensors_dtype: str) -> str:
    """The torch name of a safetensors dtype: ``"BF16"`` -> ``"bfloat16"``."""
    try:
        return _DTYPES[safetensors_dtype][0]
    except KeyError:
        raise SourceError(
            f"The checkpoint holds tensors of dtype {safetensors_dtype!r}.\n"
            f"Known are {', '.join(_DTYPES)}.\n"
            "torch has no whole-byte dtype of that name.\n"
            "Convert the checkpoint, or build the model yourself: %load_model NAME your_builder"
        ) from None


def some_of(names: Iterable[object], limit: int = 5) -> str:
    """The first few names and how many more there are: for error messages."""
    ordered = sorted(str(name) for name in names)
    more = f" and {len(ordered) - limit} more" if len(ordered) > limit else ""
    return ", ".join(ordered[:limit]) + more


_ODD_KINDS = (
    (stat.S_ISFIFO, "a FIFO (a named pipe)"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISBLK, "a block device"),
    (stat.S_ISDIR, "a folder"),
)


def odd_kind(path: Path) -> str:
    """What a path is that is no regular file, empty for one. It is not opened: that could wait for ever.

    Raises OSError where there is nothing.
    """
    mode = path.stat().st_mode
    return "" if stat.S_ISREG(mode) else next((kind for is_kind, kind in _ODD_KINDS if is_kind(mode)), "a special file")


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """What tells that a file is still the one that was read."""

    device: int
    inode: int
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, path_or_fd: str | os.PathLike[str] | int) -> FileIdentity:
        """The identity of the file behind a path or an open descriptor."""
        stat = os.stat(path_or_fd)
        return cls(stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)


@dataclass(frozen=True, eq=False)  # eq by object: the field fd has no meaning outside it
class WeightFile:
    """An open read-only file, shared by all ranges in it and closed when the last of them goes.

    The descriptor keeps the bytes readable even when the path is replaced or unlinked.
    """

    path: Path
    fd: int
    identity: FileIdentity

    def __post_init__(self) -> None:
        weakref.finalize(self, os.close, self.fd).atexit = False  # the system closes it then

    @classmethod
    def open(cls, path: Path) -> WeightFile:
        """Open a regular file for reading; it is closed when the last reference to it goes."""
        _refuse_odd(path)
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return cls(path, fd, FileIdentity.of(fd))
        except BaseException:
            os.close(fd)
            raise

    def unchanged(self) -> bool:
        """Tell whether the descriptor still reads what was opened: not cut, grown or written in place."""
        try:
            return FileIdentity.of(self.fd) == self.identity
        except OSError:
            return False

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill the whole buffer with the bytes at offset, or raise `BackingLostError`."""
        view = buffer.cast("B")
        done = 0
        while done < len(view):
            got = self._pread(view[done : done + CHUNK_BYTES], offset + done)
            if not got:
                raise self._lost(f"Wanted {len(view)} bytes at {offset}, got {done}.", "The file is cut short.")
            done += got

    def _pread(self, view: memoryview, offset: int) -> int:
        try:
            return os.preadv(self.fd, [view], offset)
        except OSError as error:
            cause = f"The system says: {error.strerror}."
            raise self._lost(f"Wanted {len(view)} bytes at {offset}, got 0.", cause) from error

    def _lost(self, numbers: str, cause: str) -> BackingLostError:
        return BackingLostError(
            f"The weight file {self.path} cannot be read.\n{numbers}\n{cause}\n"
            "Bring the file back and load the model again: %load_model NAME SOURCE"
        )


@dataclass(frozen=True, slots=True)
class TensorRange:
    """The bytes of one tensor; dtype is the safetensors name, such as ``"F32"``."""

    file: WeightFile
    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Every tensor's range by name; path is the file or the index that was read."""

    path: Path
    tensors: Mapping[str, TensorRange]

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """Read and validate the headers of a file, of an index's shards, or of a folder's checkpoint."""
        path = Path(path).expanduser()
        try:
            return _open_folder(path) if path.is_dir() else _open_file(path)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):  # says nothing about the checkpoint
                raise
            raise _unreadable(path, "0 bytes read.", f"The system says: {error.strerror}.") from error

    @property
    def files(self) -> tuple[WeightFile, ...]:
        """The distinct files behind the tensors, in order of first use."""
        return tuple(dict.fromkeys(found.file for found in self.tensors.values()))


def _open_folder(folder: Path) -> Checkpoint:
    for stem in _CANONICAL_STEMS:
        single, index = folder / f"{stem}.safetensors", folder / f"{stem}{INDEX_SUFFIX}"
        if single.exists() and index.exists():
            return _open_both(single, index)
        if single.exists() or index.exists():
            return _open_file(single if single.exists() else index)
    return _open_file(_only_candidate(folder))


def _only_candidate(folder: Path) -> Path:
    indexes = sorted(folder.glob(f"*{INDEX_SUFFIX}"))
    found = indexes or sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return found[0]
    kind = "indexes" if indexes else "safetensors files without an index"
    names = f": {some_of(path.name for path in found)}" if found else ""
    raise SourceError(
        f"The folder {folder} does not say which file holds the weights.\n"
        f"It has {len(found)} {kind}{names}.\n"
        "One canonical file or index, or a single file, is needed.\n"
        "Name the file itself: %load_model NAME FOLDER/FILE.safetensors --into MODULE"
    )


def _open_both(single: Path, index: Path) -> Checkpoint:
    """The single file, if the shards beside it say the same.

    Saving anew into a folder leaves the older form there. An index whose shards are all gone is such a
    leftover; but where both are readable, the single file may be the stale one, and libraries prefer it.
    """
    checkpoint = _open_file(single)
    if not any((index.parent / shard).exists() for shard in set(_weight_map(index).values())):
        return checkpoint
    differing = _differing(checkpoint.tensors, _open_file(index).tensors)
    if differing:
        raise SourceError(
            f"The folder {single.parent} holds two checkpoints, {single.name} and {index.name}.\n"
            f"They differ in {len(differing)} tensors: {some_of(differing)}.\n"
            "One of them is left over from an earlier save, and nothing tells which.\n"
            f"Delete the stale one, such as: !rm '{index}'"
        )
    return checkpoint


def _differing(one: Mapping[str, TensorRange], two: Mapping[str, TensorRange]) -> set[str]:
    return {name for name in one.keys() | two.keys() if not _same_tensor(one.get(name), two.get(name))}


def _same_tensor(one: TensorRange | None, two: TensorRange | None) -> bool:
    if one is None or two is None or (one.dtype, one.shape) != (two.dtype, two.shape):
        return False
    if (one.file.identity, one.offset) == (two.file.identity, two.offset):
        return True
    return all(left == right for left, right in zip(_chunks(one), _chunks(two), strict=True))


def _chunks(tensor: TensorRange) -> Iterator[bytearray]:
    for start in range(0, tensor.nbytes, CHUNK_BYTES):
        chunk = bytearray(min(CHUNK_BYTES, tensor.nbytes - start))
        tensor.file.read_into(memoryview(chunk), tensor.offset + start)
        yield chunk


def _open_file(path: Path) -> Checkpoint:
    tensors = _read_index(path) if path.name.endswith(INDEX_SUFFIX) else _read_shard(path)
    return Checkpoint(path, MappingProxyType(tensors))


def _read_index(index: Path) -> dict[str, TensorRange]:
    weight_map = _weight_map(index)
    shards = sorted(set(weight_map.values()))
    missing = [shard for shard in shards if not (index.parent / shard).exists()]
    if missing:
        numbers = f"{len(missing)} of {len(shards)} shards are missing: {some_of(missing)}."
        raise _unreadable(index, numbers, "The index names files that are not beside it.")
    tensors: dict[str, TensorRange] = {}
    for shard in shards:
        held = _read_shard(index.parent / shard)
        _match(index, shard, assigned={name for name in weight_map if weight_map[name] == shard}, held=set(held))
        tensors |= held
    return tensors


def _match(index: Path, shard: str, assigned: set[str], held: set[str]) -> None:
    if lacking := assigned - held:
        numbers = f"{shard} lacks {len(lacking)} of {len(assigned)} tensors: {some_of(lacking)}."
        raise _unreadable(index, numbers, "The shard is not the one that the index describes.")
    if unlisted := held - assigned:
        numbers = f"{shard} holds {len(unlisted)} tensors that the index does not list: {some_of(unlisted)}."
        raise _unreadable(index, numbers, "The index is stale, or the shard is of another checkpoint.")


def _weight_map(index: Path) -> dict[str, str]:
    _refuse_odd(index)
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        if all(_is_relative(shard) for shard in weight_map.values()):
            return dict(weight_map)
        cause = "A shard must be a file beside the index, or below it."
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        cause = f"It is no index of shards ({type(error).__name__}: {error})."
    raise _unreadable(index, f"{index.stat().st_size} bytes of JSON.", cause)


def _is_relative(shard: object) -> bool:
    return isinstance(shard, str) and not Path(shard).is_absolute() and ".." not in Path(shard).parts


def _read_shard(path: Path) -> dict[str, TensorRange]:
    file = WeightFile.open(path)
    start, header = _read_header(file)
    header.pop("__metadata__", None)
    try:
        tensors = {name: _range_of(file, start, entry) for name, entry in header.items()}
    except (KeyError, TypeError, ValueError) as error:
        raise _unreadable(path, f"{len(header)} tensors.", f"The header is damaged ({error}).") from error
    _check_layout(file, start, tensors)
    return tensors


def _read_header(file: WeightFile) -> tuple[int, dict[str, Any]]:
    """Where the data starts, and the parsed JSON before it."""
    size = file.identity.size
    length = int.from_bytes(_bytes_at(file, 0, LENGTH_BYTES), "little") if size >= LENGTH_BYTES else -1
    if not 0 < length <= min(size - LENGTH_BYTES, MAX_HEADER_BYTES):
        numbers = f"{size} bytes on disk, a header of {max(length, 0)} bytes."
        raise _unreadable(file.path, numbers, "It is cut short, or no safetensors file.")
    try:
        header = json.loads(_bytes_at(file, LENGTH_BYTES, length))
    except (ValueError, RecursionError) as error:
        raise _unreadable(file.path, f"A header of {length} bytes.", f"It is no JSON ({error}).") from error
    if not isinstance(header, dict):
        raise _unreadable(file.path, f"A header of {length} bytes.", "It is no JSON object.")
    return LENGTH_BYTES + length, header


def _bytes_at(file: WeightFile, offset: int, nbytes: int) -> bytes:
    buffer = bytearray(nbytes)
    file.read_into(memoryview(buffer), offset)
    return bytes(buffer)


def _range_of(file: WeightFile, start: int, entry: Mapping[str, Any]) -> TensorRange:
    dtype, (begin, end) = str(entry["dtype"]), entry["data_offsets"]
    shape = tuple(entry["shape"])
    if not all(type(number) is int and number >= 0 for number in (begin, end, *shape)):
        raise ValueError("offsets and shapes must be whole numbers")
    if dtype in _DTYPES and end - begin != math.prod(shape) * _DTYPES[dtype][1]:
        raise ValueError(f"{end - begin} bytes for {dtype} of shape {list(shape)}")
    return TensorRange(file, start + begin, end - begin, dtype, shape)


def _check_layout(file: WeightFile, start: int, tensors: Mapping[str, TensorRange]) -> None:
    """The ranges must follow one another from the header to the very end of the file."""
    end = start
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if tensor.offset != end or tensor.nbytes < 0:
            numbers = f"{name} begins at {tensor.offset}, expected {end}."
            raise _unreadable(file.path, numbers, "The header is damaged: ranges overlap or leave holes.")
        end += tensor.nbytes
    size = file.identity.size
    if size != end:
        cause = "It is cut short." if size < end else "Something was appended to it."
        raise _unreadable(file.path, f"{size} bytes on disk, {end} by its header.", cause)


def _refuse_odd(path: Path) -> None:
    if kind := odd_kind(path):
        raise SourceError(
            f"The checkpoint {path} cannot be used.\n0 bytes read.\n"
            f"It is {kind} and no regular file, and weights are read from many places of a file, again and again.\n"
            "Copy the weights into a file, then: %load_model NAME FILE.safetensors --into MODULE"
        )


def _unreadable(path: Path, numbers: str, cause: str) -> SourceError:
    return SourceError(
        f"The checkpoint {path} cannot be used.\n{numbers}\n{cause}\n"
        "Fetch or save the checkpoint again, then: %load_model NAME SOURCE"
    )
