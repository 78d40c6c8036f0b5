"""Small cases of public bug reports: figures of a device or of the RAM that are absent, or count the same twice.

Without these, a notebook does not start where NVML is forbidden, the same memory is promised twice, or unloading fills
the RAM. Each test names the report that it is about.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import types
import warnings

import psutil
import pytest
import torch
from place import DEVICE, same_values
from torch import nn

import vram_magic as vm
from vram_magic.devices import host
from vram_magic.sizes import format_size

if DEVICE == "cuda":
    import simulated

pytestmark = pytest.mark.usefixtures("whole_device")

MIB, GIB = 1 << 20, 1 << 30


def stack(layers: int = 8) -> nn.Sequential:
    """Layers of 1 MiB."""
    return nn.Sequential(*[nn.Linear(512, 512, bias=False, device=DEVICE) for _ in range(layers)])


def take(size_bytes: int) -> torch.Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8, device=DEVICE)


# --- NVML -------------------------------------------------------------------------------------------------------------


class RefusalError(Exception):
    """As NVML refuses: not supported, no permission, no driver."""


def refuse(*_arguments: object) -> None:
    raise RefusalError


def nvml(**functions: object) -> types.ModuleType:
    module = types.ModuleType("pynvml")
    silent = types.SimpleNamespace(pid=2**22 + 5, usedGpuMemory=None)
    answers = {
        "NVMLError": RefusalError,
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetHandleByUUID": lambda uuid: uuid,
        "nvmlDeviceGetComputeRunningProcesses": lambda handle: [silent],
        "nvmlDeviceGetGraphicsRunningProcesses": lambda handle: [silent],
        "nvmlDeviceGetMemoryInfo": lambda handle: types.SimpleNamespace(total=None, used=None, free=None),
    }
    vars(module).update(answers | functions)
    return module


NVML = {
    "absent": None,
    "no driver": nvml(nvmlInit=refuse),
    "no such device": nvml(nvmlDeviceGetHandleByUUID=refuse),
    "partly supported": nvml(nvmlDeviceGetComputeRunningProcesses=refuse),
    "forbidden": nvml(
        nvmlDeviceGetComputeRunningProcesses=refuse,
        nvmlDeviceGetGraphicsRunningProcesses=refuse,
        nvmlDeviceGetMemoryInfo=refuse,
    ),
    "no figures": nvml(),
}


# case: nvml-missing
@pytest.mark.parametrize("found", NVML)
def test_whatever_nvml_is_like_a_notebook_starts_and_reports_without_a_word_of_it(bare_notebook, monkeypatch, found):
    monkeypatch.setitem(sys.modules, "pynvml", NVML[found])
    if DEVICE == "cuda":
        simulated.set_foreign(64 * MIB)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert bare_notebook.run("%load_ext vram_magic") == ""
        shown = bare_notebook.run("%vram")
        bare_notebook.run("%vram doctor")
        manager = vm.manager()
        assert manager.budget_bytes > 0  # of `auto`, so the figure is torch's or the system's
        assert f" of {format_size(manager.budget_bytes)} used" in shown
        assert bare_notebook.run("%vram budget 64MiB").startswith("budget 64.0 MiB")
        with pytest.raises(torch.OutOfMemoryError, match=r"budget is 64\.0 MiB"):
            take(65 * MIB)  # the error, too, asks for the processes
    assert not [warning for warning in warned if "nvml" in str(warning.message).lower()]
    if DEVICE == "cuda":
        assert "other processes and the driver: 64.0 MiB" in shown


# case: nvml-missing
@pytest.mark.cpu_only("no device")
def test_an_nvml_that_refuses_to_shut_down_is_no_reason_to_fail(monkeypatch):
    from vram_magic.devices.nvml import processes_on

    monkeypatch.setitem(sys.modules, "pynvml", nvml(nvmlShutdown=refuse))
    assert processes_on("GPU-1") == (f"a process (pid {2**22 + 5})",)


# --- unified memory ---------------------------------------------------------------------------------------------------


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Makes this a machine of 8 GiB, nearly all of it page cache, without a container's limit."""

    def of(*, free_mib: int, available_mib: int) -> None:
        folder = tmp_path / "proc"
        folder.mkdir(exist_ok=True)
        figures = {"MemTotal": 8192, "MemFree": free_mib, "MemAvailable": available_mib, "Cached": 7000}
        figures |= dict.fromkeys(("Buffers", "Shmem", "Active", "Inactive"), 0)
        (folder / "meminfo").write_text("".join(f"{name}: {mib * 1024} kB\n" for name, mib in figures.items()))

        def virtual_memory():
            with monkeypatch.context() as patch:
                patch.setattr(psutil, "PROCFS_PATH", str(folder))
                return psutil.virtual_memory()

        monkeypatch.setattr(host, "psutil", types.SimpleNamespace(virtual_memory=virtual_memory))
        monkeypatch.setattr(host, "_CGROUP", ())

    return of


RESERVE_BYTES = int(8 * GIB * 0.10)


# case: unified-memory
def test_page_cache_is_memory_that_can_be_had(machine, tmp_path):
    gc.collect()  # what others left would be freed meanwhile
    machine(free_mib=200, available_mib=1500)
    if DEVICE == "cuda":
        simulated.set_integrated(True)
    with vm.VRAMManager(DEVICE, spill_dir=tmp_path / "spill") as mgr:
        held = mgr.used_bytes + (torch.cuda.memory_reserved() - mgr.used_bytes if DEVICE == "cuda" else 0)
        assert mgr.budget_bytes == 1500 * MIB - RESERVE_BYTES + held
        assert mgr.free_bytes == 1500 * MIB - RESERVE_BYTES + held - mgr.used_bytes


# case: unified-memory
@pytest.mark.simulation_only
def test_on_unified_memory_the_figures_never_sum_up_to_more_than_there_is(machine, tmp_path):
    machine(free_mib=200, available_mib=1500)
    simulated.set_integrated(True)
    model = stack(64)
    with vm.VRAMManager(DEVICE, spill_dir=tmp_path / "spill", host_budget="1GiB", block_bytes="1MiB") as mgr:
        handle = mgr.register("model", model)
        for _ in range(2):
            outside = mgr.outside()
            assert outside.free_bytes == 1500 * MIB
            assert torch.cuda.memory_reserved() + outside.free_bytes + outside.foreign_bytes == outside.total_bytes
            assert mgr.budget_bytes <= outside.total_bytes - RESERVE_BYTES
            handle.evict()


# case: unified-memory
@pytest.mark.simulation_only
def test_a_pool_that_is_smaller_than_the_ram_bounds_the_budget(machine, tmp_path):
    machine(free_mib=200, available_mib=6000)
    simulated.set_integrated(True)
    held = take(900 * MIB)
    with vm.VRAMManager(DEVICE, spill_dir=tmp_path / "spill") as mgr:
        assert mgr.budget_bytes <= 2 * GIB - RESERVE_BYTES
    del held


# case: unified-memory
@pytest.mark.parametrize("residency", ["auto", "host"])
def test_where_memory_is_shared_a_copy_in_ram_is_no_gain_so_it_goes_to_disk(tmp_path, residency):
    if DEVICE == "cuda":
        simulated.set_integrated(True)
    model = stack()
    expected = [p.detach().cpu().clone() for p in model.parameters()]
    with vm.VRAMManager(DEVICE, "1GiB", spill_dir=tmp_path, host_budget="1GiB") as mgr:
        handle = mgr.register("model", model, residency=residency)
        assert handle.evict() == 8 * MIB
        assert mgr.spilled_bytes >= 8 * MIB
        handle.load()
        assert all(same_values(p.detach(), e) for p, e in zip(model.parameters(), expected, strict=True))


# --- RSS --------------------------------------------------------------------------------------------------------------

RSS = """
import gc, ctypes
import torch
import vram_magic as vm

def anonymous_bytes():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))

mgr = vm.VRAMManager("cpu", "4GiB", block_bytes="16MiB")
assert mgr.guard == "native", mgr.guard
base = mgr.used_bytes
for count, size in ((100, 4 << 20), (20000, 16 << 10)):
    before = anonymous_bytes()
    tensors = [torch.ones(size, dtype=torch.uint8) for _ in range(count)]
    assert mgr.used_bytes == base + count * size
    grown = anonymous_bytes() - before
    assert grown > 0.8 * count * size, grown
    model = torch.nn.ParameterList(torch.nn.Parameter(t, requires_grad=False) for t in tensors[: min(count, 500)])
    total = sum(p.nbytes for p in model)
    handle = mgr.register("model", model)
    del tensors
    assert mgr.used_bytes == base + total, "what was dropped still counts"
    assert handle.evict() == total
    assert mgr.used_bytes == base
    if size > 1 << 20:
        kept = anonymous_bytes() - before
        assert kept < 0.2 * grown, (kept, grown)
    handle.load()
    assert mgr.used_bytes == base + total
    assert all(bool((p == 1).all()) for p in model)
    del model, handle
    gc.collect()
    assert mgr.used_bytes == base
print("ok")
"""


# case: rss-not-returned
@pytest.mark.cpu_only("allocator")
def test_what_is_in_use_is_counted_by_live_tensors_and_large_ones_leave_the_process():
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(RSS)], capture_output=True, text=True, timeout=90, check=False
    )
    assert (done.stdout, done.returncode) == ("ok\n", 0), done.stderr


# --- the RAM below ----------------------------------------------------------------------------------------------------


# case: ram-fills-on-unload
@pytest.mark.simulation_only
@torch.no_grad()
def test_copies_in_ram_never_pass_their_limit_not_even_in_the_middle_of_a_move(tmp_path, monkeypatch):
    limit, taken = 5 * MIB, []
    with vm.VRAMManager(DEVICE, "1GiB", block_bytes="1MiB", spill_dir=tmp_path, host_budget=limit) as mgr:
        memory = mgr._torch_models._host
        mgr.budget_bytes = mgr.used_bytes + 10 * MIB
        real = type(memory).take

        def noted(self, size_bytes):
            share = real(self, size_bytes)
            taken.append(self.used_bytes)
            return share

        monkeypatch.setattr(type(memory), "take", noted)
        models = {}
        for name in ("one", "two", "three"):
            models[name] = stack(4)
            mgr.register(name, models[name])
        expected = {name: [p.cpu().clone() for p in model.parameters()] for name, model in models.items()}
        x = torch.ones(1, 512, device=DEVICE)
        for name in ("one", "two", "three", "one", "three", "two"):
            models[name](x)
            assert memory.used_bytes <= limit
            assert mgr.used_bytes <= mgr.budget_bytes
        for handle in mgr.models.values():
            handle.evict()
        assert max(taken) <= limit
        assert mgr.spilled_bytes >= 7 * MIB  # 12 less 5
        for name, model in models.items():
            assert all(same_values(p, e) for p, e in zip(model.parameters(), expected[name], strict=True))
    assert memory.used_bytes == 0
