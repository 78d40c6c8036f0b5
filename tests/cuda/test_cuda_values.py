"""Weights of a CUDA model survive round trips bit for bit, wherever they were meanwhile.

Copies on the stand-in are real: a piece that is lost, doubled or swapped on its way through the pinned buffers shows.
"""

from __future__ import annotations

import gc

import pytest
import torch
from helpers import MIB, contents, stack, take
from safetensors.torch import save_file
from torch import nn

import vram_magic as vm

pytestmark = [pytest.mark.timeout(100), pytest.mark.usefixtures("watchdog")]


def mixed() -> nn.Module:
    """Ties, views, a transposed weight, a buffer that is not saved, several dtypes, sizes around a copy's piece."""
    model = nn.Module()
    model.large = nn.Parameter(torch.randn((16 * MIB + 4096) // 4))
    model.tied = model.large
    base = torch.randn(5000)
    model.head, model.tail = nn.Parameter(base[:3000]), nn.Parameter(base[2000:])
    model.turned = nn.Parameter(torch.randn(300, 700).t())
    model.short = nn.Parameter(torch.randn(1001).half(), requires_grad=False)
    model.register_buffer("steps", torch.tensor(7), persistent=False)
    model.register_buffer("nothing", torch.empty(0))
    for tensor in [*model.parameters(), *model.buffers()]:
        assert tensor.device.type == "cpu"
    return model


def to_device(model: nn.Module) -> nn.Module:
    """As `Module.cuda`, but that views of one storage stay so."""
    moved = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in moved:
            whole = torch.empty(0, dtype=torch.uint8).set_(storage)
            moved[storage.data_ptr()] = whole.cuda()
        there = moved[storage.data_ptr()].untyped_storage()
        tensor.data = torch.empty(0, dtype=tensor.dtype, device="cuda").set_(
            there, tensor.storage_offset(), tensor.shape, tensor.stride()
        )
    return model


def everything(model: nn.Module) -> dict[str, torch.Tensor]:
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    return {name: tensor.detach().cpu().clone() for name, tensor in named}


@pytest.mark.parametrize("residency", ["auto", "host", "disk"])
def test_a_mixed_model_comes_back_as_it_was(open_manager, residency):
    model = to_device(mixed())
    before = everything(model)
    ids = {name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)}
    strides = {name: parameter.stride() for name, parameter in model.named_parameters()}
    mgr = open_manager()
    used = mgr.used_bytes
    handle = mgr.register("mixed", model, residency=residency)
    for _ in range(3):
        handle.evict()
        assert handle.device_bytes == 0, handle.why()
        assert mgr.used_bytes < used
        assert all(torch.equal(tensor, before[name]) for name, tensor in everything(model).items())
        handle.load()
        assert handle.state == "device"
        assert mgr.used_bytes == used
        assert all(tensor.is_cuda for tensor in [*model.parameters(), *model.buffers()])
        assert all(torch.equal(tensor, before[name]) for name, tensor in everything(model).items())
    assert {name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)} == ids
    assert {name: parameter.stride() for name, parameter in model.named_parameters()} == strides
    assert model.head.untyped_storage().data_ptr() == model.tail.untyped_storage().data_ptr()


def test_a_model_from_a_file_leaves_without_a_copy_and_returns_from_it(open_manager, tmp_path):
    values = {name: tensor.cpu().contiguous() for name, tensor in stack(6).state_dict().items()}
    save_file(values, tmp_path / "model.safetensors")
    mgr = open_manager()
    handle = mgr.load("filed", tmp_path / "model.safetensors", into=stack(6))
    model = handle.model
    for _ in range(2):
        assert all(parameter.is_cuda for parameter in model.parameters())
        assert all(map(torch.equal, contents(model), values.values()))
        handle.evict()
        assert (handle.state, mgr.spilled_bytes) == ("disk", 0)
        assert all(map(torch.equal, contents(model), values.values()))
        handle.load()


def test_an_edit_survives_wherever_it_was_made(open_manager):
    model = stack(4)
    mgr = open_manager()
    handle = mgr.register("edited", model)
    for value in (3, 4):
        model[1].weight.data.copy_(torch.full((512, 512), float(value)))  # a copy: kernels do nothing here
        assert handle.evict() == 4 * MIB
        assert model[1].weight.unique().tolist() == [value]
        model[2].weight.fill_(-value)
        handle.load()
        assert model[1].weight.cpu().unique().tolist() == [value]
        assert model[2].weight.cpu().unique().tolist() == [-value]


def test_a_model_of_the_processor_is_brought_to_the_device_when_it_is_loaded(open_manager):
    mgr = open_manager()
    model = nn.Linear(512, 512, bias=False)
    before = model.weight.detach().clone()
    handle = mgr.load("there", model)
    assert handle.state == "device"
    assert model.weight.is_cuda
    assert torch.equal(model.weight.detach().cpu(), before)


def test_forgetting_and_closing_leave_the_model_whole(open_manager):
    first, second = stack(3), stack(3)
    before = contents(first), contents(second)
    mgr = open_manager()
    mgr.register("first", first).evict()
    mgr.register("second", second).evict()
    mgr["first"].forget()
    assert all(map(torch.equal, contents(first), before[0]))
    mgr.close()
    gc.collect()
    assert all(map(torch.equal, contents(second), before[1]))


def test_when_the_last_reference_goes_the_bytes_go(open_manager):
    mgr = open_manager()
    used = mgr.used_bytes
    model = stack(5)
    mgr.register("gone", model)
    del model
    gc.collect()
    assert "gone" not in mgr
    assert mgr.used_bytes == used


def test_a_failed_load_leaves_the_model_evicted_and_whole(open_manager):
    model = stack(20)
    before = contents(model)
    mgr = open_manager()
    handle = mgr.register("idle", model)
    handle.evict()
    taken = take(mgr.free_bytes - 4 * MIB)
    with pytest.raises(vm.VRAMOutOfMemoryError):
        handle.load()
    assert handle.device_bytes == 0
    assert all(map(torch.equal, contents(model), before))
    del taken
    handle.load()
    assert all(map(torch.equal, contents(model), before))
