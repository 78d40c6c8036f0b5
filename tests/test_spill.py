"""Spill files: private, whole or absent, and gone when nobody needs them.

Without this a killed kernel leaves gigabytes behind, and a full disk costs a weight.
"""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from place import DEVICE, same_values

import vram_magic as vm
from vram_magic.residency.spill import SpillStore

MIB = 1 << 20
NO_COPIES = {"host_budget": 0}  # an accelerator's weights would be copied into RAM first; the CPU's never are


@pytest.fixture
def manager_options():
    return NO_COPIES


def files(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file()]


def test_the_folder_and_its_files_are_private(mgr, tmp_path):
    mgr.register("model", model := torch.nn.Linear(512, 512, device=DEVICE))
    mgr["model"].evict()
    assert files(tmp_path)
    for file in files(tmp_path):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert mgr.spilled_bytes >= mgr["model"].total_bytes
    assert model is not None


def test_an_unchanged_model_is_not_written_again(mgr, tmp_path):
    mgr.register("model", model := torch.nn.Linear(512, 512, device=DEVICE))
    mgr["model"].evict()
    before = [(file, file.stat().st_mtime_ns) for file in files(tmp_path)]
    mgr["model"].load()
    mgr["model"].evict()
    assert [(file, file.stat().st_mtime_ns) for file in files(tmp_path)] == before
    assert model is not None


def test_files_go_when_the_model_goes(mgr, tmp_path):
    model = torch.nn.Linear(512, 512, device=DEVICE)
    mgr.register("model", model)
    mgr["model"].evict()
    del model
    assert "model" not in mgr
    assert not files(tmp_path)


def test_forget_and_close_remove_the_files_and_leave_the_weights(tmp_path):
    mgr = vm.VRAMManager(device=DEVICE, budget="1GiB", spill_dir=tmp_path, **NO_COPIES)
    models = [torch.nn.Linear(256, 256, device=DEVICE) for _ in range(2)]
    before = [model.weight.detach().clone() for model in models]
    for i, model in enumerate(models):
        mgr.register(f"m{i}", model)
        mgr[f"m{i}"].evict()
    mgr["m0"].forget()
    mgr.close()
    assert not list(tmp_path.iterdir())
    for model, weight in zip(models, before, strict=True):
        assert same_values(model.weight, weight)
        assert "forward" not in vars(model)


def test_a_full_disk_keeps_the_model_resident_and_leaves_nothing_partial(mgr, tmp_path, monkeypatch):
    model = torch.nn.Linear(512, 512, device=DEVICE)
    before = model.weight.detach().clone()
    mgr.register("model", model)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert mgr["model"].evict() == 0
    assert mgr["model"].state == "device"
    assert "No space left" in mgr["model"].why()
    assert not files(tmp_path)
    assert torch.equal(model.weight, before)
    monkeypatch.undo()
    assert mgr["model"].evict() == mgr["model"].total_bytes


def test_a_free_disk_reserve_is_kept(tmp_path, monkeypatch):
    store = SpillStore(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda _: os.statvfs_result and _Disk(100 * MIB, 99 * MIB, MIB))
    with pytest.raises(OSError, match="stay reserved"):
        store.write([(MIB, [memoryview(bytes(MIB))])])
    assert not files(tmp_path)


class _Disk:
    def __init__(self, total: int, used: int, free: int) -> None:
        self.total, self.used, self.free = total, used, free


def test_what_a_killed_kernel_left_is_swept_and_a_living_one_is_not(tmp_path):
    code = f"""
import place, os, sys, torch, vram_magic as vm
mgr = vm.VRAMManager(device=place.DEVICE, budget="1GiB", spill_dir={str(tmp_path)!r}, host_budget=0)
model = torch.nn.Linear(256, 256, device=place.DEVICE)
mgr.register("model", model).evict()
print("ready", flush=True)
sys.stdin.read()
"""
    kernel = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert kernel.stdout.readline() == "ready\n"
    SpillStore(tmp_path).open()
    assert files(tmp_path)  # it lives
    kernel.send_signal(signal.SIGKILL)
    kernel.wait()
    kernel.stdin.close()
    kernel.stdout.close()
    SpillStore(tmp_path).open()
    assert not files(tmp_path)


def test_files_go_at_the_normal_end_of_a_kernel(tmp_path):
    code = f"""
import place, torch, vram_magic as vm
mgr = vm.VRAMManager(device=place.DEVICE, budget="1GiB", spill_dir={str(tmp_path)!r}, host_budget=0)
model = torch.nn.Linear(256, 256, device=place.DEVICE)
mgr.register("model", model).evict()
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    assert not files(tmp_path)
