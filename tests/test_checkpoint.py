"""Checkpoints: without these, a missing, short or foreign shard loads in silence, its weights random."""

from __future__ import annotations

import gc
import json
import os
import shutil
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from vram_magic.errors import BackingLostError, SourceError
from vram_magic.residency import checkpoint as checkpoint_module
from vram_magic.residency.checkpoint import (
    Checkpoint,
    FileIdentity,
    TensorRange,
    WeightFile,
    torch_dtype_name,
)

pytestmark = pytest.mark.cpu_only("no device")

FIRST, SECOND, INDEX = (
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
)


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    return {
        "a": torch.arange(12, dtype=torch.float32).view(3, 4),
        "b": torch.arange(5, dtype=torch.bfloat16),
        "c": torch.tensor(7, dtype=torch.int64),
        "d": torch.empty(0, 3),
    }


@pytest.fixture
def sharded(tmp_path, tensors):
    """A folder of two shards, {a, b} and {c, d}, with their index."""
    shards = {FIRST: ("a", "b"), SECOND: ("c", "d")}
    for shard, names in shards.items():
        save_file({name: tensors[name] for name in names}, tmp_path / shard)
    write_index(tmp_path / INDEX, {name: shard for shard, names in shards.items() for name in names})
    return tmp_path


def write_index(path, weight_map):
    path.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def write_raw(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def value_of(found: TensorRange) -> torch.Tensor:
    raw = bytearray(found.nbytes)
    found.file.read_into(memoryview(raw), found.offset)
    dtype = getattr(torch, torch_dtype_name(found.dtype))
    flat = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    return flat.view(found.shape)


def refusal(path) -> str:
    with pytest.raises(SourceError) as caught:
        Checkpoint.open(path)
    message = str(caught.value)
    assert len(message.splitlines()) == 4, message
    return message


def test_ranges_hold_the_very_bytes_that_the_library_reads(sharded, tensors):
    found = Checkpoint.open(sharded).tensors
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(value_of(found[name]), tensor), name


@pytest.mark.parametrize("name", ["model.safetensors", "diffusion_pytorch_model.safetensors", "any.safetensors"])
def test_a_folder_with_one_file_is_that_file(tmp_path, tensors, name):
    save_file(tensors, tmp_path / name)
    assert Checkpoint.open(tmp_path).path == tmp_path / name


def test_the_canonical_index_wins_over_other_files(sharded, tensors):
    save_file(tensors, sharded / "consolidated.safetensors")
    shutil.copy(sharded / INDEX, sharded / "other.safetensors.index.json")
    assert Checkpoint.open(sharded).path == sharded / INDEX


def test_all_ranges_of_a_shard_share_one_open_file(sharded):
    checkpoint = Checkpoint.open(sharded)
    assert [file.path.name for file in checkpoint.files] == [FIRST, SECOND]


def test_a_missing_shard_is_named(sharded):
    (sharded / SECOND).unlink()
    assert SECOND in refusal(sharded)


def test_a_shard_that_was_cut_short_is_named(sharded):
    os.truncate(sharded / FIRST, (sharded / FIRST).stat().st_size - 1)
    assert FIRST in refusal(sharded)


def test_a_shard_with_bytes_after_its_end_is_refused(sharded):
    with (sharded / FIRST).open("ab") as file:
        file.write(b"more")
    assert "appended" in refusal(sharded)


def test_two_indexes_without_a_canonical_one_are_both_named(sharded):
    (sharded / INDEX).rename(sharded / "one.safetensors.index.json")
    shutil.copy(sharded / "one.safetensors.index.json", sharded / "two.safetensors.index.json")
    message = refusal(sharded)
    assert "one.safetensors.index.json" in message
    assert "two.safetensors.index.json" in message


def test_loose_files_without_an_index_are_named(sharded):
    (sharded / INDEX).unlink()
    message = refusal(sharded)
    assert FIRST in message
    assert SECOND in message


def test_a_tensor_that_the_index_does_not_list_is_named(sharded):
    write_index(sharded / INDEX, {"a": FIRST, "c": SECOND, "d": SECOND})
    assert "not list: b" in refusal(sharded)


def test_a_tensor_that_its_shard_lacks_is_named(sharded):
    write_index(sharded / INDEX, {"a": FIRST, "b": FIRST, "c": SECOND, "d": SECOND, "e": SECOND})
    assert "lacks 1 of 3 tensors: e" in refusal(sharded)


def test_at_most_five_names_are_told_and_the_rest_counted(sharded):
    extra = {f"x{number}": FIRST for number in range(9)}
    write_index(sharded / INDEX, {"a": FIRST, "b": FIRST, "c": SECOND, "d": SECOND} | extra)
    assert "x0, x1, x2, x3, x4 and 4 more" in refusal(sharded)


def test_a_stale_single_file_beside_newer_shards_is_refused(sharded, tensors):
    save_file(tensors | {"a": tensors["a"] + 1}, sharded / "model.safetensors")
    assert "1 tensors: a" in refusal(sharded)


def test_a_single_file_and_shards_that_agree_are_accepted(sharded, tensors):
    save_file(tensors, sharded / "model.safetensors")
    assert Checkpoint.open(sharded).path.name == "model.safetensors"


def test_an_index_left_over_by_a_save_into_one_file_does_no_harm(sharded, tensors):
    save_file(tensors, sharded / "model.safetensors")
    (sharded / FIRST).unlink()
    (sharded / SECOND).unlink()
    assert Checkpoint.open(sharded).path.name == "model.safetensors"


@pytest.mark.parametrize("shard", ["../model.safetensors", 7, None])
def test_an_index_that_points_outside_its_folder_is_refused(tmp_path, shard):
    write_index(tmp_path / INDEX, {"a": shard})
    assert "beside the index" in refusal(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', "{"])
def test_a_damaged_index_is_refused(tmp_path, text):
    (tmp_path / INDEX).write_text(text)
    assert INDEX in refusal(tmp_path)


def entry(dtype="F32", shape=(1,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        b"[]",
        b"[" * 100_000,
        {"a": 3},
        {"a": {"dtype": "F32", "shape": [1]}},
        {"a": entry(shape=(2,))},  # 8 bytes, 4 given
        {"a": entry(shape=(-1,), offsets=(4, 0))},
        {"a": entry(shape=(1.0,))},
        {"a": entry(offsets=(4, 8))},  # a hole before it
        {"a": entry(), "b": entry()},  # overlap
        {"a": entry(shape=(4,), offsets=(0, 16))},  # beyond the end
        {"a": entry(dtype="X9", offsets=(4, 0))},
    ],
)
def test_a_damaged_header_is_refused(tmp_path, header):
    refusal(write_raw(tmp_path / "model.safetensors", header, b"\0" * 4))


@pytest.mark.parametrize("raw", [b"", b"1234567", struct.pack("<Q", 2**63) + b"{}", struct.pack("<Q", 0)])
def test_what_is_no_safetensors_file_is_refused(tmp_path, raw):
    (tmp_path / "model.safetensors").write_bytes(raw)
    refusal(tmp_path / "model.safetensors")


def test_a_path_that_is_not_there_is_refused(tmp_path):
    assert "No such file" in refusal(tmp_path / "none.safetensors")
    assert "0 safetensors files" in refusal(tmp_path)


def test_an_unknown_dtype_can_be_located_but_not_named(tmp_path):
    path = write_raw(tmp_path / "model.safetensors", {"a": entry(dtype="F4", shape=(8,))}, b"\0" * 4)
    assert Checkpoint.open(path).tensors["a"].nbytes == 4
    with pytest.raises(SourceError):
        torch_dtype_name("F4")


def test_every_dtype_that_the_library_writes_is_known(tmp_path):
    dtypes = [
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16),
        *(torch.uint32, torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64),
    ]
    save_file({str(dtype): torch.zeros(3, dtype=dtype) for dtype in dtypes}, tmp_path / "model.safetensors")
    for name, found in Checkpoint.open(tmp_path).tensors.items():
        assert f"torch.{torch_dtype_name(found.dtype)}" == name


def test_the_bytes_stay_readable_when_the_path_is_replaced_or_unlinked(sharded, tensors):
    found = Checkpoint.open(sharded).tensors["a"]
    save_file({"a": torch.zeros(3, 4)}, sharded / "new")
    (sharded / "new").replace(sharded / FIRST)
    assert found.file.unchanged()
    (sharded / FIRST).unlink()
    assert torch.equal(value_of(found), tensors["a"])


def test_a_file_written_in_place_is_no_longer_unchanged(sharded):
    file = Checkpoint.open(sharded).files[0]
    assert file.unchanged()
    os.utime(sharded / FIRST, ns=(0, 1))
    assert not file.unchanged()


def test_a_short_read_names_file_wanted_and_got(sharded, monkeypatch):
    monkeypatch.setattr(checkpoint_module, "CHUNK_BYTES", 16)
    found = Checkpoint.open(sharded).tensors["a"]
    os.truncate(sharded / FIRST, found.offset + 20)
    with pytest.raises(BackingLostError) as caught:
        value_of(found)
    message = str(caught.value)
    assert FIRST in message
    assert "Wanted 48 bytes" in message
    assert "got 20" in message


def test_a_long_read_goes_in_chunks(sharded, tensors, monkeypatch):
    monkeypatch.setattr(checkpoint_module, "CHUNK_BYTES", 7)
    assert torch.equal(value_of(Checkpoint.open(sharded).tensors["a"]), tensors["a"])


def test_the_file_is_closed_with_the_last_range(sharded):
    checkpoint = Checkpoint.open(sharded)
    found, fd = checkpoint.tensors["a"], checkpoint.tensors["a"].file.fd
    del checkpoint
    gc.collect()
    os.fstat(fd)
    del found
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_an_open_file_is_not_inherited_by_child_processes(sharded):
    assert not os.get_inheritable(WeightFile.open(sharded / FIRST).fd)


def test_identity_is_the_same_by_path_and_by_descriptor(sharded):
    file = WeightFile.open(sharded / FIRST)
    assert FileIdentity.of(sharded / FIRST) == FileIdentity.of(file.fd) == file.identity


def test_opening_reads_headers_only(tmp_path, monkeypatch):
    save_file({"a": torch.zeros(1_000_000)}, tmp_path / "model.safetensors")
    read, preadv = [], os.preadv
    monkeypatch.setattr(os, "preadv", lambda *args: read.append(preadv(*args)) or read[-1])
    Checkpoint.open(tmp_path)
    assert sum(read) < 1000  # of 4,000,000
    assert load_file(tmp_path / "model.safetensors")["a"].numel() == 1_000_000
