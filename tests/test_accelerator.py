"""What only an accelerator has: host copies under a limit, other processes, a driver's word, captures, two sides.

Without these, unloading a model fills the RAM, a budget is believed that another process has eaten, an absent or
forbidden NVML stops the start, a capture is broken by an eviction, and a forgotten model is left half on each side.
"""

import builtins
import gc
import sys
import threading
import types

import pytest
import torch
from place import DEVICE
from safetensors.torch import save_file
from torch import nn

import vram_magic as vm
from vram_magic.devices import accelerator, nvml
from vram_magic.devices.meter import MeasuredMeter
from vram_magic.sizes import format_size

if DEVICE == "cuda":
    import simulated

pytestmark = pytest.mark.simulation_only

MIB = 1 << 20


@pytest.fixture(autouse=True)
def whole_device():
    """A device of 2 GiB for this test alone, with gradients off."""
    gc.collect()
    simulated.set_capacity(2 << 30)
    with torch.no_grad():
        yield
    simulated.set_foreign(0)
    simulated.set_integrated(False)
    simulated.set_capturing(False)
    simulated.set_capacity(simulated.CAPACITY_BYTES)


def stack(layers=8):
    return nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(layers)]).to(DEVICE)


def filed(folder, layers=8):
    """A model whose weights are in a file, and the file."""
    model = stack(layers)
    save_file({name: tensor.cpu() for name, tensor in model.state_dict().items()}, folder / "weights.safetensors")
    return model, folder / "weights.safetensors"


# ------------------------------------------------------------------------------------------------- where weights go


def test_a_weight_that_its_file_holds_leaves_to_the_file_and_takes_no_ram(mgr, tmp_path):
    model, path = filed(tmp_path)
    expected = [p.clone() for p in model.parameters()]
    h = mgr.register("m", model, source=path)
    assert h.evict() == 8 * MIB
    assert h.state == "disk"
    assert mgr.spilled_bytes == 0
    assert all(
        p.device.type == "cpu" and torch.equal(p, e.cpu()) for p, e in zip(model.parameters(), expected, strict=True)
    )
    h.load()
    assert all(p.device.type == DEVICE and torch.equal(p, e) for p, e in zip(model.parameters(), expected, strict=True))


def test_a_weight_without_a_file_leaves_to_ram_and_what_is_written_there_comes_back(mgr):
    model = stack()
    h = mgr.register("m", model)
    h.evict()
    assert h.state == "host"
    assert mgr.spilled_bytes == 0
    model[0].weight.data.neg_()
    model[1].weight[0, 0] = 7
    changed = [p.clone() for p in model.parameters()]
    h.load()
    assert all(torch.equal(p.cpu(), c) for p, c in zip(model.parameters(), changed, strict=True))


def test_an_edit_on_the_device_of_a_weight_from_a_file_survives(mgr, tmp_path):
    model, path = filed(tmp_path)
    h = mgr.register("m", model, source=path)
    model[3].weight.data.neg_()  # no version counter sees it, and a sum of the bits would not either
    edited = model[3].weight.clone()
    h.evict()
    h.load()
    assert torch.equal(model[3].weight, edited)
    assert "3.weight" in h.why()


def test_the_copies_in_ram_stay_below_their_limit_and_the_rest_is_spilled(tmp_path):
    with vm.VRAMManager(DEVICE, "1GiB", block_bytes="1MiB", spill_dir=tmp_path, host_budget="5MiB") as mgr:
        models = [stack() for _ in range(3)]
        expected = [[p.clone() for p in model.parameters()] for model in models]
        for i, model in enumerate(models):
            mgr.register(f"m{i}", model).evict()
        assert mgr.spilled_bytes == 19 * MIB
        assert "Elsewhere: 5.0 MiB in RAM, 3.0 MiB in spill files." in mgr["m0"].why()
        for h in mgr.models.values():
            h.load()
        for model, weights in zip(models, expected, strict=True):
            assert all(torch.equal(p, e) for p, e in zip(model.parameters(), weights, strict=True))


def test_a_dropped_model_gives_its_copies_ram_back(tmp_path):
    with vm.VRAMManager(DEVICE, "1GiB", block_bytes="1MiB", spill_dir=tmp_path, host_budget="8MiB") as mgr:
        for _ in range(3):
            model = stack()
            mgr.register("m", model).evict()
            assert mgr.spilled_bytes == 0
            del model
            gc.collect()


def test_residency_disk_without_a_file_is_a_spill_file_not_ram(mgr):
    h = mgr.register("m", model := stack(), residency="disk")
    before = model[0].weight.clone()
    h.evict()
    assert mgr.spilled_bytes == 8 * MIB
    h.load()
    assert torch.equal(model[0].weight, before)


def test_residency_host_copies_even_what_a_file_holds(mgr, tmp_path):
    model, path = filed(tmp_path)
    h = mgr.register("m", model, source=path, residency="host")
    h.evict()
    assert h.state == "host"
    path.unlink()
    h.load()
    assert h.state == "device"
    assert "differ" not in h.why()


def test_on_unified_memory_a_copy_in_ram_is_no_gain_and_the_budget_knows_the_ram(tmp_path, monkeypatch):
    simulated.set_integrated(True)
    monkeypatch.setattr(accelerator, "available_ram_bytes", lambda: 900 * MIB)
    monkeypatch.setattr(accelerator, "ram_reserve_bytes", lambda: 100 * MIB)
    with vm.VRAMManager(DEVICE, spill_dir=tmp_path) as mgr:
        assert mgr.budget_bytes <= 800 * MIB
        model = stack()
        mgr.register("m", model).evict()
        assert mgr.spilled_bytes == 8 * MIB


# -------------------------------------------------------------------------------------------------- other processes


def test_auto_is_what_the_driver_says_less_a_reserve_and_follows_others(tmp_path):
    with vm.VRAMManager(DEVICE, spill_dir=tmp_path) as mgr:
        alone = mgr.budget_bytes
        assert 1 << 30 < alone < 2 << 30
        simulated.set_foreign(1 << 30)
        mgr.make_room(0)
        assert mgr.budget_bytes == alone - (1 << 30)


def test_memory_that_another_process_took_makes_models_leave_though_the_budget_has_room(mgr):
    model = stack(16)
    h = mgr.register("m", model)
    simulated.set_foreign((2 << 30) - 24 * MIB)
    x = torch.empty(12 * MIB, dtype=torch.uint8, device=DEVICE)
    assert x.numel()
    assert h.state == "partial"
    assert mgr.budget_bytes == 1 << 30


def test_memory_of_another_process_is_named_and_nobody_leaves_for_nothing(mgr, monkeypatch):
    monkeypatch.setattr(accelerator, "processes_on", lambda uuid: ("game (pid 7) 1.9 GiB",))
    h = mgr.register("m", stack())
    simulated.set_foreign((2 << 30) - 16 * MIB)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        torch.empty(64 * MIB, dtype=torch.uint8, device=DEVICE)
    assert "other processes 2.0 GiB (game (pid 7) 1.9 GiB)" in str(raised.value)
    assert "End the other processes" in str(raised.value)
    assert mgr.last_error.holders["other processes"] > 1 << 30
    assert h.state == "device"


def test_a_load_that_the_books_allow_and_the_device_refuses_makes_others_leave(mgr):
    first, second = stack(16), stack(16)
    one, two = mgr.register("first", first), mgr.register("second", second)
    expected = second[0].weight.clone()
    two.evict()
    torch.accelerator.empty_cache()
    simulated.set_foreign((2 << 30) - 20 * MIB)
    two.load()
    assert two.state == "device"
    assert one.device_bytes < 16 * MIB
    assert torch.equal(second[0].weight, expected)


def test_the_report_tells_budget_driver_and_others_apart(notebook):
    simulated.set_foreign(256 * MIB)
    shown = notebook.run("%vram")
    assert f"cuda:0: {format_size(vm.manager().used_bytes)} of 64.0 MiB used" in shown
    assert "(guard: native)" in shown
    assert "other processes and the driver: 256.0 MiB; " in shown
    assert "of 2.0 GiB free on the device" in shown


# ------------------------------------------------------------------------------------------------------------- NVML


class RefusalError(Exception):
    """As NVML refuses."""


def fake_nvml(**functions):
    module = types.ModuleType("pynvml")
    module.NVMLError = RefusalError
    nothing = {name: lambda *a: [] for name in (
        "nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses",
    )}  # fmt: skip
    found = {"nvmlInit": lambda: None, "nvmlShutdown": lambda: None, "nvmlDeviceGetHandleByUUID": lambda u: u}
    vars(module).update(found | nothing | functions)
    return module


def refuse(*args):
    raise RefusalError


PROCESS = types.SimpleNamespace(pid=2**22 + 5, usedGpuMemory=3 << 30)


@pytest.mark.parametrize(
    ("module", "told"),
    [
        (fake_nvml(nvmlInit=refuse), ()),
        (fake_nvml(nvmlDeviceGetHandleByUUID=refuse), ()),
        (fake_nvml(nvmlDeviceGetComputeRunningProcesses=refuse), ()),
        (
            fake_nvml(nvmlDeviceGetComputeRunningProcesses=lambda handle: [PROCESS]),
            (f"a process (pid {PROCESS.pid}) 3.0 GiB",),
        ),
        (
            fake_nvml(
                nvmlDeviceGetGraphicsRunningProcesses=lambda handle: [
                    types.SimpleNamespace(pid=PROCESS.pid, usedGpuMemory=None)
                ]
            ),
            (f"a process (pid {PROCESS.pid})",),
        ),
    ],
    ids=["no driver", "no such device", "forbidden", "told", "no figure"],
)
def test_nvml_tells_what_it_can_and_its_refusals_are_normal(monkeypatch, module, told):
    monkeypatch.setitem(sys.modules, "pynvml", module)
    assert nvml.processes_on("GPU-1") == told


def test_without_nvml_all_works_and_nothing_is_said_of_processes(monkeypatch, mgr):
    real = builtins.__import__

    def absent(name, *args, **kwargs):
        if name == "pynvml":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    monkeypatch.setattr(builtins, "__import__", absent)
    simulated.set_foreign(64 * MIB)
    assert mgr.outside(processes=True).processes == ()
    assert mgr.outside().foreign_bytes == 64 * MIB


# --------------------------------------------------------------------------------------------------------- captures


def test_while_a_graph_is_captured_nothing_leaves_and_the_error_says_so(mgr):
    model = stack()
    h = mgr.register("m", model)
    mgr.budget_bytes = mgr.used_bytes + MIB
    simulated.set_capturing(True)
    with pytest.raises(torch.OutOfMemoryError, match="captured"):
        torch.empty(4 * MIB, dtype=torch.uint8, device=DEVICE)
    assert torch.empty(MIB // 2, dtype=torch.uint8, device=DEVICE).numel()  # what fits is given
    simulated.set_capturing(False)
    assert h.state == "device"
    assert torch.empty(4 * MIB, dtype=torch.uint8, device=DEVICE).numel()
    assert h.state == "partial"


def test_a_capture_anywhere_in_the_process_is_known_everywhere(tmp_path, monkeypatch):
    calls = []
    for name in ("capture_begin", "capture_end"):
        monkeypatch.setattr(torch.cuda.CUDAGraph, name, lambda graph, name=name: calls.append(name))
    begin, end = torch.cuda.CUDAGraph.capture_begin, torch.cuda.CUDAGraph.capture_end
    with vm.VRAMManager(DEVICE, "1GiB", spill_dir=tmp_path) as mgr:
        h = mgr.register("m", model := stack())
        thread = threading.Thread(target=torch.cuda.CUDAGraph.capture_begin, args=(None,))
        thread.start()
        thread.join()
        with pytest.raises(vm.ModelInUseError, match="captured"):
            h.evict()
        torch.cuda.CUDAGraph.capture_end(None)
        assert h.evict() == 8 * MIB
        torch.cuda.CUDAGraph.capture_begin(None)
        with pytest.raises(vm.ModelInUseError, match="captured"):
            model(torch.randn(1, 512, device=DEVICE))
        torch.cuda.CUDAGraph.capture_end(None)
        model(torch.randn(1, 512, device=DEVICE))
    assert calls == ["capture_begin", "capture_end"] * 2
    assert (torch.cuda.CUDAGraph.capture_begin, torch.cuda.CUDAGraph.capture_end) == (begin, end)


# -------------------------------------------------------------------------------------------------- two sides


def test_a_model_on_the_cpu_is_brought_in_at_its_first_call_and_its_inputs_with_it(mgr):
    model = nn.Linear(64, 64)
    twin = nn.Linear(64, 64).to(DEVICE)
    twin.load_state_dict(model.state_dict())
    h = mgr.register("m", model)
    assert h.state == "host"
    x = torch.randn(4, 64)
    assert torch.equal(model(x), twin(x.to(DEVICE)))
    assert h.state == "device"


def test_a_forgotten_model_is_whole_on_one_side(mgr):
    model = stack(16)
    h = mgr.register("m", model)
    expected = model[0].weight.cpu()
    mgr.budget_bytes = mgr.used_bytes
    x = torch.empty(4 * MIB, dtype=torch.uint8, device=DEVICE)
    assert h.state == "partial"
    h.forget()  # no room to bring the rest
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    del x
    mgr.register("again", model).load()
    assert torch.equal(model[0].weight.cpu(), expected)
    mgr.budget_bytes = mgr.used_bytes
    x = torch.empty(4 * MIB, dtype=torch.uint8, device=DEVICE)
    del x
    mgr["again"].forget()
    assert {p.device.type for p in model.parameters()} == {DEVICE}
    assert torch.equal(model[0].weight.cpu(), expected)


def test_a_state_dict_that_is_held_while_the_model_comes_back_keeps_true_values(mgr):
    model = stack()
    h = mgr.register("m", model)
    h.evict()
    held = model.state_dict()
    expected = {name: tensor.clone() for name, tensor in held.items()}
    h.load()
    assert all(p.device.type == DEVICE for p in model.parameters())
    assert all(torch.equal(held[name], expected[name]) for name in held)


def test_a_weight_with_a_gradient_stays_and_says_why(mgr):
    model = stack()
    h = mgr.register("m", model)
    with torch.enable_grad():
        model(torch.randn(1, 512, device=DEVICE)).sum().backward()
    assert h.evict() == 0
    assert "gradient" in h.why()
    model.zero_grad()
    assert h.evict() == 8 * MIB


def test_weights_of_another_device_are_left_alone(mgr):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, device="meta")).to_empty(device=DEVICE)
    model[1] = nn.Linear(8, 8, device="meta")
    h = mgr.register("m", model)
    h.evict()
    assert "on the device meta" in h.why()


# ------------------------------------------------------------------------------------------------- without a guard


def test_without_a_guard_room_is_made_at_managed_calls_and_the_report_says_so(tmp_path, monkeypatch):
    from vram_magic import opening
    from vram_magic.guard.build import GuardUnavailable

    def none(device):
        raise GuardUnavailable("no C++ compiler (install g++)")

    monkeypatch.setattr(opening, "load_accelerator_guard", none)
    with vm.VRAMManager(DEVICE, "20MiB", block_bytes="1MiB", spill_dir=tmp_path) as mgr:
        assert mgr.guard == "none: no C++ compiler (install g++); room is made at managed calls and reserve only"
        before = mgr.used_bytes
        first, second = stack(12), stack(12)
        one, two = mgr.register("first", first), mgr.register("second", second)
        assert mgr.used_bytes - before == 24 * MIB
        two.evict()
        one.evict()
        x = torch.randn(1, 512, device=DEVICE)
        first(x)
        second(x)
        assert two.state == "device"
        assert one.state == "partial"
        with mgr.reserve("7MiB"):
            assert mgr.used_bytes - before <= 13 * MIB + 4096
            kept = torch.empty(6 * MIB, dtype=torch.uint8, device=DEVICE)
        assert mgr.used_bytes <= 20 * MIB
        assert kept.numel()


def test_the_measured_meter_counts_a_reservation_once_while_it_is_used():
    live = [10]
    meter = MeasuredMeter(lambda: live[0])
    meter.limit_bytes = 100
    held = meter.reserve(50)
    assert meter.committed_bytes == 60
    live[0] += 30
    assert meter.committed_bytes == 60
    assert held.left_bytes == 20
    assert meter.reserve(41) is None
    held.release()
    assert meter.committed_bytes == 40
    spent = meter.reserve(20)
    spent.spend(20)
    assert (meter.live_bytes, meter.committed_bytes) == (60, 60)
    meter.give_back(20)
    assert meter.committed_bytes == 40


# ------------------------------------------------------------------------------------------------- opening


def test_the_accelerator_is_the_default_and_has_one_manager(tmp_path):
    with vm.VRAMManager(budget="1GiB", spill_dir=tmp_path) as mgr:
        assert mgr.device == "cuda:0"
        with pytest.raises(vm.VRAMError, match="has a manager already"):
            vm.VRAMManager("cuda")
        with vm.VRAMManager("cpu", "1GiB", spill_dir=tmp_path) as other:
            assert other.device == "cpu"
            assert vm.manager() is mgr


@pytest.mark.parametrize("name", ["cuda:7", "xpu", "gpu", "meta"])
def test_a_device_that_is_not_there_is_told_with_those_that_are(name):
    with pytest.raises(vm.VRAMError) as raised:
        vm.VRAMManager(name)
    assert len(str(raised.value).splitlines()) == 4
    assert "cpu and 1 of cuda" in str(raised.value)


def test_after_close_the_allocator_is_torchs_own_again(tmp_path):
    for _ in range(3):
        with vm.VRAMManager(DEVICE, "8MiB", spill_dir=tmp_path) as mgr:
            assert mgr.guard == "native"
            with pytest.raises(torch.OutOfMemoryError):
                torch.empty(9 * MIB, dtype=torch.uint8, device=DEVICE)
        assert torch.empty(9 * MIB, dtype=torch.uint8, device=DEVICE).numel()
