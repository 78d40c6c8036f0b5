"""Tensors that have no storage, or none that can be asked, and sources that are no files, stop nobody.

Without it one nested buffer, or a call inside a transform of ``torch.func``, keeps every model from moving, a tensor
that once shared memory with a buffer gets that buffer's values, and a named pipe given as a source hangs the notebook.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import socket
import warnings

import pytest
import torch
from place import DEVICE, same_values
from safetensors.torch import save_file
from torch import nn
from torch.func import functional_call, grad, jvp, vmap

import vram_magic as vm
from vram_magic.devices.accelerator import AcceleratorDevice
from vram_magic.devices.cpu import CpuDevice
from vram_magic.residency.spans import survey

LAYER_BYTES = 256 * 256 * 4


@pytest.fixture
def manager_options():
    return {"block_bytes": "256KiB"}


def stack(layers: int = 4) -> nn.Sequential:
    model = nn.Sequential(*[nn.Linear(256, 256, bias=False, device=DEVICE) for _ in range(layers)])
    return model.requires_grad_(requires_grad=False)


def ones() -> torch.Tensor:
    return torch.ones(2, 256, device=DEVICE)


def own_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Weights of the user's, all 2, to be used in place of the model's."""
    return {name: torch.full_like(weight, 2, device=DEVICE) for name, weight in model.named_parameters()}


@pytest.fixture
def nested():
    with warnings.catch_warnings(), torch.device(DEVICE):
        warnings.simplefilter("ignore")  # they are a prototype
        return torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)])


needs_kernels = pytest.mark.skipif(DEVICE != "cpu", reason="the simulated GPU has few kernels for nested tensors")


def flat(nested: torch.Tensor) -> torch.Tensor:
    """The memory of a nested tensor of float32."""
    storage = nested.untyped_storage()
    return torch.empty(0, device=storage.device).set_(storage, 0, (storage.nbytes() // 4,), (1,))


# --- nested tensors and others without a storage ------------------------------------------------------------


def test_a_nested_buffer_stays_and_the_rest_of_its_model_leaves(mgr, nested):
    model = stack()
    expected = model(ones())
    model.register_buffer("ragged", nested)
    handle = mgr.register("model", model)
    assert handle.total_bytes == 4 * LAYER_BYTES + nested.untyped_storage().nbytes()
    assert handle.evict() == 4 * LAYER_BYTES
    assert "ragged" in handle.why()
    assert "a nested tensor" in handle.why()
    assert torch.equal(model(ones()), expected)
    handle.load()
    assert same_values(flat(model.ragged), torch.ones(18))


@pytest.mark.parametrize("place", ["buffer", pytest.param("parameter", marks=needs_kernels), "attribute"])
def test_a_nested_tensor_of_one_model_keeps_no_other_from_leaving(mgr, nested, place):
    odd, other, last = stack(), stack(), nn.Module()
    odd.append(last)  # a model leaves from its tail
    handles = mgr.register("odd", odd), mgr.register("other", other)
    if place == "buffer":
        last.register_buffer("ragged", nested)
    elif place == "parameter":
        last.ragged = nn.Parameter(nested)
    else:
        last.ragged = nested
    mgr.budget_bytes = mgr.used_bytes + LAYER_BYTES
    room = torch.empty(6 * LAYER_BYTES, dtype=torch.uint8, device=DEVICE)
    assert handles[0].device_bytes < LAYER_BYTES
    assert handles[1].state == "partial"
    assert mgr.plan(mgr.free_bytes + LAYER_BYTES).satisfied
    del room


@needs_kernels
def test_the_memory_of_a_nested_tensor_stays_with_the_views_of_it(mgr, nested):
    model = stack(1)
    model.register_buffer("ragged", nested)
    model.register_buffer("part", nested.unbind()[0])
    alone = nn.Module()
    alone.register_buffer("part", nested.unbind()[1])
    handles = mgr.register("model", model), mgr.register("alone", alone)
    assert handles[0].total_bytes == LAYER_BYTES + nested.untyped_storage().nbytes()
    assert handles[0].evict() == LAYER_BYTES
    assert handles[1].evict() == 0
    model.part.fill_(5)
    alone.part.fill_(7)
    assert [part.unique().tolist() for part in nested.unbind()] == [[5], [7]]


@needs_kernels
def test_a_buffer_under_a_nested_attribute_stays(mgr, nested):
    model = stack(1)
    model.register_buffer("flat", torch.ones(18, device=DEVICE))
    model.ragged = torch._nested_view_from_buffer(
        model.flat,
        nested._nested_tensor_size(),
        nested._nested_tensor_strides(),
        nested._nested_tensor_storage_offsets(),
    )
    handle = mgr.register("model", model)
    handle.evict()
    handle.load()
    model.flat.fill_(3)
    assert torch.equal(model.ragged.unbind()[1], torch.full((4, 3), 3.0, device=DEVICE))


@pytest.mark.parametrize(
    "make",
    [lambda: torch._efficientzerotensor((8,)), lambda: torch.ones(8, 8).to_mkldnn()],
    ids=["zeros of autograd", "mkldnn"],
)
def test_a_tensor_without_memory_counts_no_bytes_and_keeps_nobody(mgr, make):
    model = stack()
    model.register_buffer("odd", make())
    handle = mgr.register("model", model)
    assert handle.total_bytes == 4 * LAYER_BYTES
    assert handle.evict() == 4 * LAYER_BYTES
    assert "odd" in handle.why()
    assert handle.state != "device"


# --- transforms of torch.func ---------------------------------------------------------------------------------


class Asking(nn.Module):
    """Calls ``ask`` in the middle of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(256, 256, bias=False, device=DEVICE)
        self.register_buffer("scale", torch.ones(256, device=DEVICE))
        self.ask = lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.ask()
        return self.layer(x) * self.scale


def in_grad(model: nn.Module) -> dict[str, torch.Tensor]:
    return grad(lambda weights: functional_call(model, weights, (ones(),)).sum())(own_weights(model))


def in_vmap(model: nn.Module) -> torch.Tensor:
    stacked = {name: torch.stack([weight, weight]) for name, weight in own_weights(model).items()}
    return vmap(lambda weights: functional_call(model, weights, (ones(),)))(stacked)


def in_vmap_of_grad(model: nn.Module) -> dict[str, torch.Tensor]:
    stacked = {name: torch.stack([weight, weight]) for name, weight in own_weights(model).items()}
    return vmap(grad(lambda weights: functional_call(model, weights, (ones(),)).sum()))(stacked)


def in_jvp(model: nn.Module) -> tuple[torch.Tensor, ...]:
    weights = own_weights(model)
    return jvp(lambda weights: functional_call(model, weights, (ones(),)), (weights,), (weights,))


def in_functionalize(model: nn.Module) -> torch.Tensor:
    return torch.func.functionalize(lambda weights: functional_call(model, weights, (ones(),)))(own_weights(model))


# Forward mode makes zeros of autograd on the device, for which the simulated GPU has no maker.
forward_mode = pytest.param(in_jvp, marks=pytest.mark.skipif(DEVICE != "cpu", reason="forward mode needs a real GPU"))
TRANSFORMS = pytest.mark.parametrize("transformed", [in_grad, in_vmap, in_vmap_of_grad, forward_mode, in_functionalize])


@TRANSFORMS
def test_inside_a_transform_every_question_is_answered_and_others_move(mgr, transformed):
    model, other = Asking(), stack()
    handle, idle = mgr.register("model", model), mgr.register("other", other)
    answers = []

    def ask() -> None:
        answers.append((handle.why(), handle.total_bytes, mgr.plan(mgr.free_bytes + 1).satisfied))
        answers.append((idle.evict(), idle.state))
        idle.load()

    model.ask = ask
    transformed(model)
    why, total_bytes, satisfied = answers[0]
    assert "inside a transform of torch.func" in why
    assert (total_bytes, satisfied) == (256 * 4, True)
    assert answers[1][0] == 4 * LAYER_BYTES
    assert answers[1][1] != "device"
    assert (handle.total_bytes, handle.state, idle.state) == (LAYER_BYTES + 256 * 4, "device", "device")


@TRANSFORMS
def test_a_bare_allocation_inside_a_transform_takes_room_of_an_idle_model(mgr, transformed):
    model, other = Asking(), stack(8)
    model.part = stack(1)
    mgr.register("part", model.part)
    idle = mgr.register("other", other)
    shapes = []

    def ask() -> None:
        mgr.budget_bytes = mgr.used_bytes + LAYER_BYTES
        shapes.append(torch.empty(6 * 256, 256, device=DEVICE).shape)

    model.ask = ask
    transformed(model)
    assert shapes == [(6 * 256, 256)]
    assert idle.state == "partial"


@TRANSFORMS
def test_an_evicted_model_computes_with_other_weights_inside_a_transform(mgr, transformed):
    model = stack(1)
    own, expected = model[0].weight.clone(), transformed(model)
    handle = mgr.register("model", model)
    handle.evict()
    torch.testing.assert_close(transformed(model), expected, rtol=0, atol=0)
    assert same_values(model[0].weight.detach(), own)
    handle.load()
    assert handle.state == "device"
    assert torch.equal(model[0].weight, own)


def test_only_some_weights_may_be_others_inside_a_transform(mgr):
    model = stack()
    x = ones()

    def loss(weights: dict[str, torch.Tensor]) -> torch.Tensor:
        return functional_call(model, weights, (x,)).square().sum()

    weights = {"3.weight": torch.ones(256, 256, device=DEVICE)}
    expected = grad(loss)(weights)["3.weight"]
    handle = mgr.register("model", model)
    handle.evict()
    assert torch.equal(grad(loss)(weights)["3.weight"], expected)
    handle.evict()
    assert handle.state != "device"


def test_what_leaked_out_of_a_transform_keeps_nobody(mgr):
    model = stack()
    model.register_buffer("kept", torch.zeros(3, device=DEVICE))

    def leak(x: torch.Tensor) -> torch.Tensor:
        model.kept = model.noted = x * 2
        return x.sum()

    grad(leak)(torch.ones(3, device=DEVICE))
    handle = mgr.register("model", model)
    assert handle.evict() >= 4 * LAYER_BYTES
    handle.load()
    assert handle.state == "device"


# --- the survey itself ------------------------------------------------------------------------------------------


class Telling(torch.Tensor):
    """A class of the user's, which answers for itself."""

    asked: list[object] = []  # noqa: RUF012  one for the class is what is wanted

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.asked.append(function)
        return super().__torch_function__(function, types, args, kwargs or {})


def test_the_survey_runs_no_code_of_a_tensors_class():
    model = stack(1)
    model.register_buffer("told", torch.ones(4, device=DEVICE).as_subclass(Telling))
    model.register_buffer("view", torch.ones(4, device=DEVICE).as_subclass(Telling)[1:])
    device = CpuDevice("1GiB") if DEVICE == "cpu" else AcceleratorDevice(torch.device(DEVICE, 0), "1GiB")
    Telling.asked.clear()
    spans = survey([("", model)], device, lambda _: False)
    assert Telling.asked == []
    assert [span.nbytes for span in spans] == [16, 16, LAYER_BYTES]


# --- bases that lie elsewhere -----------------------------------------------------------------------------------


def test_a_base_that_a_buffer_was_parted_from_keeps_its_values(mgr):
    base, model = torch.arange(64.0, device=DEVICE), nn.Module()
    model.register_buffer("table", base.view(8, 8))
    model.table.data = torch.zeros(8, 8, device=DEVICE)
    alias = model.table.detach()
    handle = mgr.register("model", model)
    handle.evict()
    handle.load()
    assert torch.equal(base, torch.arange(64.0, device=DEVICE))
    assert base.device.type == DEVICE
    model.table.fill_(3)
    assert torch.equal(alias, torch.full((8, 8), 3.0, device=DEVICE))


def test_a_buffer_that_was_parted_from_its_base_leaves(mgr):
    base, model = torch.arange(64.0, device=DEVICE), nn.Module()
    model.register_buffer("table", base.view(8, 8))
    model.table.data = torch.ones(8, 8, device=DEVICE)
    handle = mgr.register("model", model)
    assert handle.evict() == 8 * 8 * 4
    assert same_values(model.table, torch.ones(8, 8))
    handle.load()
    assert torch.equal(base, torch.arange(64.0, device=DEVICE))


def test_a_base_over_the_same_memory_moves_along(mgr):
    model = nn.Module()
    model.register_buffer("table", torch.arange(64.0, device=DEVICE).view(8, 8))
    handle = mgr.register("model", model)
    assert handle.evict() == 8 * 8 * 4
    assert model.table._base.data_ptr() == model.table.data_ptr()


def test_statistics_of_a_lazy_batch_norm_leave_once_they_are_there(mgr):
    model = nn.Sequential(nn.LazyBatchNorm1d()).to(DEVICE)
    x = torch.randn(8, 64, device=DEVICE)
    handle = mgr.register("model", model)
    model(x)
    means = model[0].running_mean.clone()
    handle.evict()
    assert handle.device_bytes == 0
    assert same_values(model[0].running_mean, means)
    model(x)
    assert not same_values(model[0].running_mean, means)


def test_buffers_cut_out_of_one_mapped_file_are_brought_in(mgr, tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(torch.arange(2048.0).numpy().tobytes())
    whole, model = torch.from_file(str(path), shared=False, size=2048), nn.Module()
    model.register_buffer("first", whole[:1024])
    model.register_buffer("second", whole[1024:])
    del whole
    handle = mgr.register("model", model)
    handle.load()
    assert (handle.state, handle.total_bytes) == ("device", 8192)
    assert same_values(torch.cat([model.first, model.second]), torch.arange(2048.0))
    handle.evict()
    assert handle.state != "device"
    assert same_values(torch.cat([model.first, model.second]), torch.arange(2048.0))


# --- sources that are no regular files ----------------------------------------------------------------------------


def four_parts(load) -> str:
    with pytest.raises(vm.SourceError) as caught:
        load()
    message = str(caught.value)
    assert len(message.splitlines()) == 4
    assert re.search(r"\d", message.splitlines()[1])
    assert "%load_model NAME" in message.splitlines()[3]
    return message


def net() -> nn.Linear:
    return nn.Linear(4, 4, bias=False, device=DEVICE)


def fifo_at(path):
    os.mkfifo(path)
    return path


@pytest.mark.timeout(120)  # what opens it waits for ever
@pytest.mark.parametrize("name", ["w.safetensors", "w.safetensors.index.json", "w.bin", "pipe"])
@pytest.mark.parametrize("into", [True, False], ids=["into a module", "alone"])
def test_a_fifo_is_refused_at_once_and_nothing_changes(mgr, tmp_path, name, into):
    path, module = fifo_at(tmp_path / name), net()
    before = module.weight.clone()
    message = four_parts(lambda: mgr.load("m", path, into=module if into else None))
    assert str(path) in message
    assert "FIFO" in message
    assert "regular file" in message
    assert "m" not in mgr.models
    assert torch.equal(module.weight, before)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json", "other.safetensors"])
def test_a_folder_whose_weights_are_a_fifo_is_refused(mgr, tmp_path, name):
    fifo_at(tmp_path / name)
    message = four_parts(lambda: mgr.load("m", tmp_path, into=net()))
    assert name in message
    assert "FIFO" in message


@pytest.mark.timeout(120)
def test_an_index_whose_shard_is_a_fifo_says_so(mgr, tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"weight": "one.safetensors"}}')
    fifo_at(tmp_path / "one.safetensors")
    message = four_parts(lambda: mgr.load("m", index, into=net()))
    assert "one.safetensors" in message
    assert "FIFO" in message


@pytest.mark.timeout(120)
def test_a_fifo_backs_no_living_model(mgr, tmp_path):
    module = net()
    four_parts(lambda: mgr.register("m", module, source=fifo_at(tmp_path / "w.safetensors")))
    assert "m" not in mgr.models


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/null"])
def test_a_device_is_refused(mgr, path):
    assert "character device" in four_parts(lambda: mgr.load("m", path, into=net()))


def test_a_socket_is_refused(mgr, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the name of a socket must be short
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as listening:
        listening.bind("w.safetensors")
        assert "a socket" in four_parts(lambda: mgr.load("m", tmp_path / "w.safetensors", into=net()))


def test_a_link_to_a_regular_file_is_one(mgr, tmp_path):
    save_file({"weight": torch.eye(4)}, tmp_path / "real.safetensors")
    (tmp_path / "link.safetensors").symlink_to(tmp_path / "real.safetensors")
    module = net()
    mgr.load("m", tmp_path / "link.safetensors", into=module)
    assert same_values(module.weight.detach(), torch.eye(4))
    gc.collect()
