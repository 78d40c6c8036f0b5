"""Quantized weights: wrappers around other tensors (torchao), packed parameters with side state (bitsandbytes).

Models in 4 and 8 bits are what fits a small card. Without these they stay resident for ever, or leave without their
scales and come back as noise.
"""

import copy
import gc
import pickle

import pytest
import torch
from place import DEVICE
from torch import nn

import vram_magic as vm

pytestmark = pytest.mark.filterwarnings("ignore")  # what other libraries say at import


class Packed(nn.Parameter):
    """As bitsandbytes': packed data, and what is needed to unpack it in attributes."""


class State:
    def __init__(self):
        self.absmax = torch.randn(64, device=DEVICE)
        self.nested = {"code": torch.randn(16, device=DEVICE), "sizes": [torch.ones(4, device=DEVICE)]}
        self.shape = torch.Size([8, 64])


class PackedLinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = Packed(torch.randint(0, 255, (64, 8), dtype=torch.uint8, device=DEVICE), requires_grad=False)
        self.weight.state = State()

    def forward(self, x):
        state = self.weight.state
        return x @ (self.weight.float() * state.absmax[:, None]) * state.nested["code"].sum()


def round_trips(mgr, model, call, name="model"):
    """Evicts and calls again and again; the output stays the same bits, and everything leaves."""
    expected = call().clone()
    handle = mgr.register(name, model)
    total = handle.total_bytes
    for _ in range(3):
        freed = handle.evict()
        assert handle.device_bytes == 0, handle.why()
        assert freed == total
        assert torch.equal(call(), expected)
        assert handle.state == "device"
        gc.collect()
    return handle


@torch.no_grad()
def test_side_state_leaves_and_returns_with_its_parameter_and_all_keeps_its_identity(mgr):
    model, x = PackedLinear(), torch.randn(2, 64, device=DEVICE)
    weight, state, absmax = model.weight, model.weight.state, model.weight.state.absmax
    handle = round_trips(mgr, model, lambda: model(x))
    assert handle.total_bytes == 64 * 8 + 4 * (64 + 16 + 4)
    assert model.weight is weight
    assert type(weight) is Packed
    assert weight.state is state
    assert state.absmax is absmax
    assert {t.device.type for t in (weight, absmax, state.nested["code"], state.nested["sizes"][0])} == {DEVICE}


@torch.no_grad()
def test_an_edit_of_side_state_survives(mgr):
    model = PackedLinear()
    handle = mgr.register("model", model)
    handle.evict()
    model.weight.state.absmax.neg_()
    edited = model.weight.state.absmax.clone()
    handle.load()
    model.weight.state.nested["code"].data.neg_()
    code = model.weight.state.nested["code"].clone()
    handle.evict()
    handle.load()
    assert torch.equal(model.weight.state.absmax.cpu(), edited.cpu())
    assert torch.equal(model.weight.state.nested["code"], code)


@torch.no_grad()
def test_two_places_that_share_a_packed_parameter_count_it_once(mgr):
    model, x = nn.Sequential(PackedLinear(), PackedLinear()), torch.randn(2, 64, device=DEVICE)
    model[1].weight = model[0].weight
    handle = round_trips(mgr, model, lambda: model[1](x) + model[0](x))
    assert handle.total_bytes == 64 * 8 + 4 * (64 + 16 + 4)
    assert model[0].weight is model[1].weight


def quantized_by_torchao(config):
    torchao = pytest.importorskip("torchao.quantization")
    model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128)).to(DEVICE, torch.bfloat16)
    torchao.quantize_(model, getattr(torchao, config)())
    return model.requires_grad_(requires_grad=False)


@pytest.mark.parametrize("config", ["Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"])
@torch.no_grad()
def test_a_model_quantized_by_torchao_makes_round_trips(mgr, config):
    model, x = quantized_by_torchao(config), torch.randn(2, 128, dtype=torch.bfloat16, device=DEVICE)
    weight = model[0].weight
    handle = round_trips(mgr, model, lambda: model(x))
    assert model[0].weight is weight
    assert handle.total_bytes < 2 * sum(p.numel() for p in model.parameters())


@torch.no_grad()
def test_a_torchao_model_leaves_under_pressure_and_is_saved_while_it_is_out(mgr, tmp_path):
    model, x = quantized_by_torchao("Int8WeightOnlyConfig"), torch.randn(2, 128, dtype=torch.bfloat16, device=DEVICE)
    expected = model(x)
    handle = mgr.register("model", model)
    mgr.make_room(mgr.free_bytes + 1)
    assert handle.device_bytes < handle.total_bytes
    torch.save(model.state_dict(), tmp_path / "model.pt")
    twin = quantized_by_torchao("Int8WeightOnlyConfig")
    twin.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=False), assign=True)
    assert torch.equal(twin.to(DEVICE)(x), expected)
    assert torch.equal(model(x), expected)


@torch.no_grad()
@pytest.mark.parametrize("part", ["the whole", "a child"])
def test_a_torchao_model_is_copied_while_it_is_out(mgr, part):
    model, x = quantized_by_torchao("Int8WeightOnlyConfig"), torch.randn(2, 128, dtype=torch.bfloat16, device=DEVICE)
    read = (lambda: model) if part == "the whole" else (lambda: model[0])
    expected = read()(x)
    handle = mgr.register("model", model)
    handle.evict()
    twin = copy.deepcopy(read())
    assert torch.equal(twin(x), expected)
    assert not [name for module in twin.modules() for name in vars(module) if name in {"state_dict", "forward"}]
    handle.evict()
    weights = pickle.loads(pickle.dumps(read().state_dict()))  # the module itself torchao makes one that cannot be
    twin.load_state_dict(weights, assign=True)
    assert torch.equal(twin(x), expected)
    handle.evict()
    twin = quantized_by_torchao("Int8WeightOnlyConfig")
    (twin if part == "the whole" else twin[0]).load_state_dict(read().state_dict(), assign=True)
    assert torch.equal((twin if part == "the whole" else twin[0])(x), expected)
    handle.forget()
    assert not [name for module in model.modules() for name in vars(module) if name == "state_dict"]


@pytest.mark.parametrize("kind", ["nf4", "fp4", "int8"])
@pytest.mark.cpu_only("bitsandbytes")
@torch.no_grad()
def test_a_model_quantized_by_bitsandbytes_makes_round_trips(mgr, kind):
    bnb = pytest.importorskip("bitsandbytes")

    def layer(rows, columns):
        if kind == "int8":
            return bnb.nn.Linear8bitLt(rows, columns, bias=False, has_fp16_weights=False)
        return bnb.nn.Linear4bit(rows, columns, bias=False, quant_type=kind, compress_statistics=True)

    model = nn.Sequential(layer(128, 256), layer(256, 128)).to(DEVICE)
    x = torch.randn(2, 128)
    model(x)
    round_trips(mgr, model, lambda: model(x))


def test_a_wrapper_without_parts_stays_and_why_says_so(mgr):
    class Opaque(torch.Tensor):
        """A tensor that computes in its own way and tells nothing of its inside."""

        @staticmethod
        def __new__(cls, inner):
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

        def __init__(self, inner):
            self.inner = inner

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            unwrapped = [a.inner if isinstance(a, Opaque) else a for a in args]
            return func(*unwrapped, **(kwargs or {}))

    model = nn.Linear(64, 64, bias=False, device=DEVICE)
    model.register_buffer("opaque", Opaque(torch.ones(8, device=DEVICE)))
    handle = mgr.register("model", model)
    handle.evict()
    assert "a tensor of type Opaque" in handle.why()
    assert isinstance(vm.manager()["model"].model.opaque, Opaque)
