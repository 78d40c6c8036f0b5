"""No edit of a weight or buffer is ever lost, however and wherever it was made; one that was undone costs nothing.

Without this an adapter, a training step or a negated row is gone after the next eviction, and nobody is told.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from place import DEVICE, footprint, same_values
from safetensors.torch import save_file
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune, vector_to_parameters

import vram_magic as vm

SIZE = 128  # a weight is a block of its own: 64 KiB
X = torch.arange(4.0 * SIZE, device=DEVICE).view(4, SIZE) / 100


@pytest.fixture
def manager_options():
    return {"block_bytes": "64KiB", "host_budget": 0}  # copies are counted in spill files


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(SIZE, SIZE, device=DEVICE)
        self.norm = nn.BatchNorm1d(SIZE, device=DEVICE)
        self.two = nn.Linear(SIZE, SIZE, device=DEVICE)
        self.register_buffer("steps", torch.zeros(SIZE, dtype=torch.int64, device=DEVICE))

    def forward(self, x):
        return self.two(self.norm(self.one(x)))


def tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))


def same(one: nn.Module, other: nn.Module) -> bool:
    mine, theirs = tensors(one), tensors(other)
    return mine.keys() == theirs.keys() and all(same_values(mine[name].detach(), theirs[name]) for name in mine)


def copied_bytes(mgr: vm.VRAMManager) -> int:
    return sum(handle._managed.body.figures.spilled_bytes for handle in mgr.models.values())


@pytest.fixture
def nets() -> tuple[Net, Net]:
    """Two that are equal: one is managed, the other is never touched by us."""
    torch.manual_seed(0)
    net, twin = Net(), Net()
    twin.load_state_dict(net.state_dict())
    return net, twin


# --- ways to edit: run on the managed model and on its twin -----------------------------------------------------------
# What `test_load` has is not repeated: add_, .data.add_, neg_, copy_, flipped rows, one element, load_state_dict, SGD.


def augmented_data(net):
    net.one.weight.data += 1


def data_copy(net):
    net.one.weight.data.copy_(torch.full((SIZE, SIZE), 3.0))


def negated_column(net):
    net.one.weight.data[:, 5].neg_()  # an even number of sign flips: a linear checksum does not see it


@torch.no_grad()
def swapped_rows(net):
    net.one.weight[[3, 9]] = net.one.weight[[9, 3]]


def swapped_data(net):
    net.one.weight.data, net.two.weight.data = net.two.weight.data, net.one.weight.data


def swapped_parameters(net):
    net.one.weight, net.two.weight = net.two.weight, net.one.weight


def swapped_modules(net):
    net.one, net.two = net.two, net.one


def swapped_tensors(net):
    torch.utils.swap_tensors(net.one.weight, net.two.weight)


def tied(net):
    net.two.weight = net.one.weight
    net.two.weight.data.mul_(2)


def untied_copy(net):
    net.two.weight.data = net.one.weight.data.clone()


def one_vector(net):
    """All parameters become slices of one storage."""
    length = sum(p.numel() for p in net.parameters())
    vector_to_parameters(torch.arange(float(length), device=net.one.weight.device), net.parameters())


def through_a_view(net):
    view = net.one.weight.detach().view(-1)[7:400:3]
    view.mul_(-1)


def through_the_storage(net):
    net.one.weight.untyped_storage()[3] = 77


def foreach(net):
    with torch.no_grad():
        torch._foreach_mul_([net.one.weight, net.two.weight], 3)


def initialised(net):
    nn.init.eye_(net.one.weight)


@torch.no_grad()
def buffers(net):
    net.steps += 5
    net.norm.running_var.fill_(4)


def buffer_by_setattr(net):
    net.steps = torch.arange(SIZE, device=DEVICE)


def deleted_and_added(net):
    del net.one.weight
    net.one.register_parameter("weight", nn.Parameter(torch.ones(SIZE, SIZE, device=DEVICE)))


def changed_dtype(net):
    net.two.double()


def pruned(net):
    prune.l1_unstructured(net.one, "weight", amount=0.5)
    prune.remove(net.one, "weight")


def normed(net):
    parametrizations.weight_norm(net.one)
    with torch.no_grad():
        net.one.parametrizations.weight.original0.mul_(2)
    parametrize.remove_parametrizations(net.one, "weight")


def frozen_and_moved(net):
    net.one.weight.requires_grad_(requires_grad=False).mul_(0.5)


def adam(net):
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        net(X).square().mean().backward()
        optimizer.step()
    optimizer.zero_grad()


EDITS = [
    augmented_data, data_copy, negated_column, swapped_rows, swapped_data, swapped_parameters, swapped_modules,
    swapped_tensors, tied, untied_copy, one_vector, through_a_view, through_the_storage, foreach, initialised, buffers,
    buffer_by_setattr, deleted_and_added, changed_dtype, pruned, normed, frozen_and_moved, adam,
]  # fmt: skip
WHEN = ["resident", "returned", "half evicted", "evicted"]


def bring_to(when: str, mgr: vm.VRAMManager, handle: vm.Handle) -> None:
    if when == "returned":
        handle.evict()
        handle.load()
    elif when == "half evicted":
        mgr.make_room(mgr.free_bytes + footprint(SIZE * SIZE * 4))
        assert handle.state == "partial"
    elif when == "evicted":
        handle.evict()
        assert handle.device_bytes == 0


# cases: in-place-changes-lost (through ``.data`` too, which no version counter sees)
@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("backed", [True, False], ids=["file", "no file"])
@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_survives(mgr, tmp_path, nets, edit, backed, when):
    if (edit, when, DEVICE) == (one_vector, "half evicted", "cuda"):
        pytest.skip("torch refuses parameters on two devices")
    net, twin = nets
    save_file(net.state_dict(), tmp_path / "net.safetensors")
    handle = mgr.register("net", net, source=tmp_path / "net.safetensors" if backed else None)
    bring_to(when, mgr, handle)
    edit(net)
    edit(twin)
    assert same(net, twin), "at once"
    for _ in range(2):
        handle.evict()
        assert same(net, twin), "evicted"
        assert handle.device_bytes == 0, handle.why()
        handle.load()
        assert same(net, twin), "back"
        assert handle.state == "device"


@pytest.mark.parametrize("when", WHEN)
def test_edits_upon_edits_survive(mgr, tmp_path, nets, when):
    net, twin = nets
    save_file(net.state_dict(), tmp_path / "net.safetensors")
    handle = mgr.register("net", net, source=tmp_path / "net.safetensors")
    for edit in [negated_column, swapped_data, data_copy, swapped_modules, adam, buffers, tied, through_a_view]:
        handle.load()
        bring_to(when, mgr, handle)
        edit(net)
        edit(twin)
        assert same(net, twin), edit.__name__
    handle.load()
    assert same(net, twin)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.int8, torch.float8_e4m3fn], ids=str
)
@pytest.mark.parametrize("when", ["returned", "evicted"])
def test_one_bit_of_a_weight_of_any_type_is_an_edit(mgr, tmp_path, dtype, when):
    net = nn.Module()
    net.register_buffer("value", torch.zeros(4096, dtype=torch.uint8, device=DEVICE).view(dtype))
    save_file({"value": net.value}, tmp_path / "net.safetensors")
    handle = mgr.register("net", net, source=tmp_path / "net.safetensors")
    bring_to(when, mgr, handle)
    net.value.view(torch.uint8)[4095] ^= 128  # a sign, most often
    for _ in range(2):
        handle.evict()
        handle.load()
        assert net.value.view(torch.uint8).sum() == 128
        assert net.value.view(torch.uint8)[4095] == 128


# --- what was undone is clean -----------------------------------------------------------------------------------------


def edit_and_undo(weight: torch.Tensor) -> None:
    weight.data.neg_()
    weight.data.neg_()


@pytest.mark.parametrize("when", WHEN)
def test_what_was_undone_before_it_left_needs_no_copy(mgr, tmp_path, nets, when):
    net, twin = nets
    save_file(net.state_dict(), tmp_path / "net.safetensors")
    handle = mgr.register("net", net, source=tmp_path / "net.safetensors")
    bring_to(when, mgr, handle)
    edit_and_undo(net.one.weight)
    handle.load()
    handle.evict()
    assert (handle.state, copied_bytes(mgr)) == ("disk", 0), handle.why()
    assert same(net, twin)


def test_only_what_was_edited_is_copied(mgr, tmp_path, nets):
    net, _ = nets
    save_file(net.state_dict(), tmp_path / "net.safetensors")
    handle = mgr.register("net", net, source=tmp_path / "net.safetensors")
    net.two.weight.data.neg_()
    handle.evict()
    assert copied_bytes(mgr) == net.two.weight.nbytes
    assert "two.weight" in handle.why()


def test_what_is_undone_after_it_left_and_came_back_is_clean_again(mgr, tmp_path, nets):
    net, twin = nets
    save_file(net.state_dict(), tmp_path / "net.safetensors")
    handle = mgr.register("net", net, source=tmp_path / "net.safetensors")
    net.two.weight.data.neg_()
    handle.evict()
    handle.load()
    net.two.weight.data.neg_()
    handle.evict()
    assert same(net, twin)
    assert copied_bytes(mgr) == 0


# --- files ------------------------------------------------------------------------------------------------------------


def test_an_edit_is_never_written_into_the_users_file(mgr, tmp_path, nets):
    net, _ = nets
    path: Path = tmp_path / "net.safetensors"
    save_file(net.state_dict(), path)
    before = path.read_bytes()
    handle = mgr.register("net", net, source=path)
    handle.evict()
    net.one.weight.data.neg_()
    handle.load()
    handle.evict()
    assert path.read_bytes() == before


@pytest.mark.parametrize("residency", ["auto", "disk", "host"])
@pytest.mark.parametrize("edit", [data_copy, negated_column, swapped_data, adam])
def test_an_edit_survives_with_every_residency(mgr, tmp_path, nets, edit: Callable[[nn.Module], None], residency):
    net, twin = nets
    save_file(net.state_dict(), tmp_path / "net.safetensors")
    handle = mgr.register("net", net, residency=residency, source=tmp_path / "net.safetensors")
    for module in nets:
        edit(module)
    handle.evict()
    edit_and_undo(net.one.weight)
    handle.load()
    for module in nets:
        data_copy(module)
    handle.residency = "auto"
    handle.evict()
    handle.load()
    assert same(net, twin)


@pytest.mark.cpu_only("numpy")
def test_an_edit_of_a_weight_that_a_loader_mapped_survives(mgr, tmp_path):
    torch.arange(4096.0).numpy().tofile(tmp_path / "raw")
    model = nn.Module()
    mapped = torch.from_file(str(tmp_path / "raw"), shared=False, size=4096, dtype=torch.float32)
    model.weight = nn.Parameter(mapped)
    del mapped
    handle = mgr.register("model", model)
    assert handle.state == "disk"
    model.weight.data[7] = -1
    for move in (handle.load, handle.evict, handle.load):
        move()
        assert model.weight[7] == -1
        assert model.weight[4095] == 4095
