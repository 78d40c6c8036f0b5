"""Small cases of public bug reports about files: what is left over, how it is read, files that another program holds.

Without these, spill files pile up, a load from a slow disk takes ages, or a locked file breaks a move. Each test names
the report that it is about.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from place import DEVICE, same_values
from safetensors.torch import load_file, save_file
from torch import nn

import vram_magic as vm
from vram_magic.residency.spill import SpillStore, default_spill_root

MIB = 1 << 20
KIB = 1 << 10


@pytest.fixture
def manager_options():
    return {"block_bytes": "4MiB", "host_budget": 0}  # what has no file is spilled, on an accelerator too


def stack(layers: int, width: int = 128) -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(width, width, device=DEVICE) for _ in range(layers)])


def files(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file()]


def values(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().cpu().clone() for p in model.parameters()]


def right(model: nn.Module, wanted: list[torch.Tensor]) -> bool:
    return all(same_values(p.detach(), value) for p, value in zip(model.parameters(), wanted, strict=True))


# --- what is left over ------------------------------------------------------------------------------------------------


# case: orphan-spill
def test_forgetting_one_model_removes_its_files_and_nobody_elses(mgr, tmp_path):
    models = {name: stack(2) for name in ("one", "two")}
    wanted = {name: values(model) for name, model in models.items()}
    mgr.register("one", models["one"]).evict()
    first = set(files(tmp_path))
    mgr.register("two", models["two"]).evict()
    second = set(files(tmp_path)) - first
    assert first
    assert second
    mgr["one"].forget()
    assert set(files(tmp_path)) == second
    assert right(models["one"], wanted["one"])
    assert right(models["two"], wanted["two"])
    del models["two"]
    assert "two" not in mgr
    assert not files(tmp_path)
    assert mgr.spilled_bytes == 0


# case: orphan-spill
def test_a_folder_of_a_dead_process_goes_and_one_whose_number_lives_again_too(tmp_path):
    store = SpillStore(tmp_path)
    own = store.folder
    pid, started, _ = own.name.split("-")
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    others = {
        "gone": own.with_name(f"{dead.pid}-{started}-0"),
        "reused": own.with_name(f"{pid}-{int(started) - 10_000}-0"),  # this pid, but an earlier process
        "not ours": own.with_name("notes"),
        "alive": own.with_name(f"{pid}-{started}-99"),
    }
    for folder in others.values():
        folder.mkdir()
        (folder / "0.weights").write_bytes(b"x")
    SpillStore(tmp_path).open()
    assert {name for name, folder in others.items() if folder.exists()} == {"not ours", "alive"}
    assert own.exists()
    store.close()


# case: orphan-spill
def test_the_report_shows_what_each_model_has_on_disk(notebook, tmp_path, monkeypatch):
    monkeypatch.setenv("VRAM_MAGIC_SPILL_DIR", str(tmp_path))
    notebook.run("first, second = build(3), build(2)")
    for name in ("first", "second"):
        notebook.run(f"%load_model {name} {name} --residency disk")
        notebook.run(f"%vram evict {name}")
    shown = notebook.run("%vram")
    assert "3.0 MiB spilled" in shown
    assert "2.0 MiB spilled" in shown


def test_the_report_shows_the_total_on_disk(notebook):
    notebook.run("first, second = build(3), build(2)")
    for name in ("first", "second"):
        notebook.run(f"%load_model {name} {name} --residency disk")
        notebook.run(f"%vram evict {name}")
    assert vm.manager().spilled_bytes == 5 * MIB
    assert re.search(r"5\.0 MiB[^\n]*(spill|disk)|(spill|disk)[^\n]*5\.0 MiB", notebook.run("%vram"))


# case: slow-network-mmap
def test_spill_files_go_to_a_local_disk_unless_told_otherwise(monkeypatch, tmp_path):
    monkeypatch.delenv("VRAM_MAGIC_SPILL_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))  # often a network drive
    monkeypatch.chdir(tmp_path)
    assert default_spill_root() == Path("/var/tmp")
    monkeypatch.setenv("VRAM_MAGIC_SPILL_DIR", str(tmp_path / "fast"))
    assert default_spill_root() == tmp_path / "fast"


# --- how files are read -----------------------------------------------------------------------------------------------


@pytest.fixture
def reads(monkeypatch) -> list[tuple[int, int]]:
    """Fills with (offset, bytes asked for) of every read of a weight file."""
    seen, read = [], os.preadv

    def watched(fd: int, buffers: list, offset: int) -> int:
        seen.append((offset, sum(len(buffer) for buffer in buffers)))
        return read(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", watched)
    return seen


# case: slow-network-mmap
@pytest.mark.parametrize("backed", [True, False], ids=["file", "spill file"])
def test_a_load_reads_every_byte_once_in_pieces_as_large_as_the_weights(mgr, tmp_path, reads, backed):
    model = stack(12)
    wanted = values(model)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    handle = mgr.register("model", model, source=tmp_path / "model.safetensors" if backed else None)
    handle.evict()
    reads.clear()
    handle.load()
    assert sorted(size for _, size in reads) == sorted(value.nbytes for value in wanted)
    ends = sorted((offset, offset + size) for offset, size in reads)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ends)), "a byte was read twice"
    assert right(model, wanted)


# case: slow-network-mmap
def test_a_large_weight_is_read_in_large_pieces(mgr, reads):
    model = nn.Linear(4096, 4096, bias=False, device=DEVICE)  # 64 MiB
    handle = mgr.register("model", model)
    handle.evict()
    reads.clear()
    handle.load()
    assert sum(size for _, size in reads) == 64 * MIB
    assert min(size for _, size in reads) >= 4 * MIB
    assert reads == sorted(reads)


# case: slow-network-mmap
@pytest.mark.parametrize("backed", [True, False], ids=["file", "spill file"])
def test_a_load_reads_the_file_from_its_begin_to_its_end(mgr, tmp_path, reads, backed):
    model = stack(12)  # a file has "10.weight" before "2.weight", and "2.bias" before that
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    handle = mgr.register("model", model, source=tmp_path / "model.safetensors" if backed else None)
    handle.evict()
    reads.clear()
    handle.load()
    assert reads == sorted(reads)


def test_the_report_tells_how_fast_a_model_came_back(notebook):
    notebook.run("%load_model net build")
    notebook.run("%vram evict net")
    notebook.run("%vram load net")
    assert "MB/s" in notebook.run("%vram") + notebook.run("%vram log") + notebook.run("%vram why net")


# --- locked files -----------------------------------------------------------------------------------------------------


def denied(*_: object, **__: object) -> None:
    raise PermissionError(errno.EACCES, "The process cannot access the file because it is being used")


def while_mapped(original: Callable) -> Callable:
    """As on Windows: a file that is mapped anywhere in the process is neither renamed nor removed nor replaced."""

    def checked(*paths: object, **options: object) -> object:
        mapped = Path("/proc/self/maps").read_text()
        if any(os.fspath(path) in mapped for path in paths if isinstance(path, str | os.PathLike)):
            denied()
        return original(*paths, **options)

    return checked


# case: windows-file-lock
def test_a_weight_file_of_the_users_can_be_replaced_once_the_model_is_loaded(mgr, tmp_path, monkeypatch):
    path, model = tmp_path / "model.safetensors", stack(3)
    save_file(model.state_dict(), path)
    wanted = values(model)
    handle = mgr.register("model", model, source=path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", while_mapped(os.replace))
        for number in range(2):
            handle.evict()
            (tmp_path / "fresh").write_bytes(path.read_bytes())
            with pytest.raises(PermissionError):
                os.replace(tmp_path / "fresh", path)  # it is mapped while the model is out
            handle.load()
            save_file({name: value + number + 1 for name, value in load_file(path).items()}, tmp_path / "fresh")
            os.replace(tmp_path / "fresh", path)
            assert right(model, wanted)
            handle.evict()
            handle.load()
            assert right(model, wanted)


# case: windows-file-lock
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_where_mapped_files_are_locked_every_move_works_and_no_file_is_left(mgr, tmp_path, monkeypatch):
    models = {name: stack(3) for name in ("one", "two")}
    wanted = {name: values(model) for name, model in models.items()}
    for name, model in models.items():
        mgr.register(name, model)
    for name in ("unlink", "replace"):
        monkeypatch.setattr(os, name, while_mapped(getattr(os, name)))
    for turn in range(3):
        for name, model in models.items():
            mgr[name].evict()
            assert mgr[name].device_bytes == 0, mgr[name].why()
            if turn == 1:
                with torch.no_grad():
                    model[0].weight.add_(1)
                wanted[name][0] += 1
            mgr[name].load()
            assert right(model, wanted[name])
    mgr["one"].forget()
    mgr.close()
    assert all(right(model, wanted[name]) for name, model in models.items())
    assert not files(tmp_path / "spill")


# case: windows-file-lock
@pytest.mark.parametrize("end", ["forget", "close"])
def test_weights_that_are_handed_back_need_no_spill_file_any_more(mgr, tmp_path, end):
    model = stack(3)
    wanted = values(model)
    handle = mgr.register("model", model)
    handle.evict()
    (handle.forget if end == "forget" else mgr.close)()
    assert right(model, wanted)
    assert not files(tmp_path / "spill")
    assert str(tmp_path / "spill") not in Path("/proc/self/maps").read_text()


# case: windows-file-lock
def test_a_spill_file_that_cannot_be_renamed_leaves_the_model_where_it_is(mgr, tmp_path, monkeypatch):
    model = stack(3)
    wanted = values(model)
    handle = mgr.register("model", model)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", denied)
        assert handle.evict() == 0
        assert handle.state == "device"
        assert "cannot access the file" in handle.why()
        assert right(model, wanted)
        assert not files(tmp_path)
    assert handle.evict() == handle.total_bytes
    handle.load()
    assert right(model, wanted)


def locked_meanwhile(mgr: vm.VRAMManager, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """A model whose old spill file could not be removed when it was of no use any more."""
    model = stack(3)
    handle = mgr.register("model", model)
    handle.evict()
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", denied)
        patch.setattr(Path, "unlink", denied)
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(1)
        wanted = values(model)
        handle.load()
        handle.evict()
        assert right(model, wanted)
        handle.load()
    assert right(model, wanted)
    return model


# case: windows-file-lock
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_file_that_was_locked_when_it_was_of_no_use_any_more_is_gone_after_close(mgr, tmp_path, monkeypatch):
    model = locked_meanwhile(mgr, monkeypatch)
    mgr.close()
    assert not files(tmp_path / "spill")
    assert model is not None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_file_that_was_locked_is_removed_with_the_next_chance(mgr, tmp_path, monkeypatch):
    model = locked_meanwhile(mgr, monkeypatch)
    mgr["model"].evict()
    mgr["model"].forget()
    assert model is not None
    assert not files(tmp_path / "spill")


def test_a_file_that_cannot_be_removed_is_no_reason_to_print(mgr, monkeypatch):
    complaints = []
    monkeypatch.setattr(sys, "unraisablehook", complaints.append)
    locked_meanwhile(mgr, monkeypatch)
    assert not complaints
