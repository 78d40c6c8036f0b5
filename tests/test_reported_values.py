"""Small cases of public bug reports: what came back wrong after a model had been moved, in other tools.

Without these, a bug that users of others were bitten by comes back here: rare dtypes, overlapping parameters, weights
that are created under somebody's mode. Each test names the report that it is about.
"""

from __future__ import annotations

import contextlib
import random
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from place import DEVICE, footprint, same_values
from torch import nn


@pytest.fixture
def manager_options():
    return {"block_bytes": "64KiB", "host_budget": 0}  # on an accelerator too, what has no file is spilled


def tensors(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def raw(tensor: torch.Tensor) -> bytes:
    """The bytes of a contiguous tensor of any dtype, wherever it lies."""
    return bytes(tensor.detach().view(-1).view(torch.uint8).tolist())


# --- ties and views ---------------------------------------------------------------------------------------------------


# case: tied-weights-untied
def test_a_tied_pair_is_written_once_and_returns_without_a_second_copy(mgr):
    model = nn.Sequential(nn.Embedding(4096, 64, device=DEVICE), nn.Linear(64, 4096, bias=False, device=DEVICE))
    model.append(nn.Linear(64, 64, bias=False, device=DEVICE))
    model[1].weight = model[0].weight
    tied, alone = model[0].weight.nbytes, model[2].weight.nbytes
    expected = model[1](model[0](torch.arange(8, device=DEVICE))).detach().clone()
    handle = mgr.register("model", model)
    assert handle.total_bytes == tied + alone
    assert handle.evict() == tied + alone
    assert tied + alone <= mgr.spilled_bytes < 2 * tied
    assert model[1].weight is model[0].weight
    before = mgr.used_bytes
    mgr.reset_peak()
    handle.load()
    assert mgr.peak_bytes - before <= tied + alone + tied
    assert mgr.used_bytes - before == tied + alone
    assert model[1].weight is model[0].weight
    assert torch.equal(model[1](model[0](torch.arange(8, device=DEVICE))), expected)


class Views(nn.Module):
    """Parameters that are slices of one buffer; no name covers all of it."""

    def __init__(self, *slices: slice) -> None:
        super().__init__()
        base = torch.arange(16.0, device=DEVICE)
        self.parts = nn.ParameterList([nn.Parameter(base[part]) for part in slices])

    def values(self) -> list[list[float]]:
        return [part.tolist() for part in self.parts]

    def place(self) -> tuple[set[int], list[tuple[int, tuple[int, ...]]]]:
        """The storages' addresses, and how each parameter lies over its own."""
        return (
            {part.untyped_storage().data_ptr() for part in self.parts},
            [(part.storage_offset(), part.stride()) for part in self.parts],
        )


# case: tied-save-error
@pytest.mark.parametrize(
    "slices",
    [
        (slice(0, 4), slice(3, 9)),
        (slice(0, 4), slice(4, 9)),
        (slice(2, 5), slice(9, 16)),
        (slice(0, 9, 2), slice(0, 9)),
    ],
    ids=["overlapping", "touching", "apart", "every other"],
)
def test_slices_of_one_buffer_share_it_still_wherever_it_lies(mgr, slices):
    model = Views(*slices)
    values, (storages, layout) = model.values(), model.place()
    assert len(storages) == 1
    handle = mgr.register("model", model)
    assert handle.total_bytes == 16 * 4
    for move in (handle.evict, handle.load, handle.evict):
        move()
        assert model.values() == values
        assert (len(model.place()[0]), model.place()[1]) == (1, layout)
    handle.load()
    twin = Views(*slices)
    for net in (model, twin):
        with torch.no_grad():
            net.parts[0].fill_(42)
            net.parts[1][:2] = 43
    assert model.values() == twin.values()
    handle.evict()
    for net in (model, twin):
        with torch.no_grad():
            net.parts[1].neg_()
    assert model.values() == twin.values()
    handle.load()
    assert model.values() == twin.values()


# --- dtypes and layouts -----------------------------------------------------------------------------------------------

RARE = [
    name
    for name in (
        "complex32", "float4_e2m1fn_x2", "float8_e8m0fnu", "bits8", "bits16", "bits1x8", "bits2x4", "bits4x2",
        *(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)),
    )
    if hasattr(torch, name)
]  # fmt: skip


# case: odd-dtypes-numpy
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", RARE)
def test_dtypes_that_numpy_and_most_of_torch_lack_come_back_byte_for_byte(mgr, dtype):
    model = nn.Module()
    value = torch.arange(96, dtype=torch.uint8, device=DEVICE).view(getattr(torch, dtype))
    model.register_buffer("value", value.view(-1, 2))
    model.weight = nn.Parameter(value, requires_grad=False)
    del value
    before = [raw(tensor) for tensor in tensors(model)]
    handle = mgr.register("model", model)
    for move in (handle.evict, handle.load, handle.evict, handle.load):
        move()
        assert [raw(tensor) for tensor in tensors(model)] == before
        assert {tensor.dtype for tensor in tensors(model)} == {getattr(torch, dtype)}
        assert handle.device_bytes == (handle.total_bytes if move == handle.load else 0), handle.why()


def per_tensor(dtype: torch.dtype) -> torch.Tensor:
    return torch.quantize_per_tensor(torch.linspace(-1, 1, 64).view(8, 8), 0.02, 3, dtype)


ODD = {
    "qint8": lambda: per_tensor(torch.qint8),
    "quint8": lambda: per_tensor(torch.quint8),
    "qint32": lambda: per_tensor(torch.qint32),
    "qint8 by channel": lambda: torch.quantize_per_channel(
        torch.linspace(-1, 1, 64).view(8, 8), torch.full((8,), 0.02), torch.zeros(8, dtype=torch.int64), 0, torch.qint8
    ),
    "sparse coo": lambda: torch.eye(8).to_sparse(),
    "sparse csr": lambda: torch.eye(8).to_sparse_csr(),
    "mkldnn": lambda: torch.linspace(-1, 1, 64).to_mkldnn(),
    "conjugate": lambda: torch.full((8,), 1 + 2j, device=DEVICE).conj(),
    "negated": lambda: torch.full((8,), 1 + 2j, device=DEVICE).conj().imag,
}


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The values as a strided tensor of floating-point numbers on the processor."""
    if tensor.is_quantized:
        return tensor.dequantize()
    return tensor.cpu().resolve_conj().resolve_neg() if tensor.layout == torch.strided else tensor.to_dense()


# case: format-unsupported
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.filterwarnings("ignore:.*quantize.*deprecated")
@pytest.mark.parametrize("kind", ODD)
def test_a_tensor_that_cannot_leave_is_named_and_nothing_is_half_moved(mgr, tmp_path, kind):
    model, x = nn.Linear(64, 64, device=DEVICE), torch.ones(2, 64, device=DEVICE)
    model.register_buffer("odd", ODD[kind]())
    odd, value, expected = model.odd, plain(model.odd).clone(), model(x).detach().clone()
    handle = mgr.register("model", model)
    for _ in range(2):
        assert handle.evict() >= model.weight.nbytes
        assert "odd" in handle.why()
        assert "cannot leave" in handle.why()
        assert model.odd is odd
        assert torch.equal(plain(odd), value)
        assert torch.equal(model(x), expected)
        assert handle.state == "device"
        assert torch.equal(plain(odd), value)
        assert not list(Path(tmp_path).rglob("*.partial"))


# --- flags and what is no tensor --------------------------------------------------------------------------------------


# case: requires-grad-lost
def test_what_is_frozen_stays_so_when_it_moves_and_when_it_is_registered_anew(mgr):
    model = nn.Sequential(nn.Linear(8, 8, device=DEVICE), nn.Linear(8, 8, device=DEVICE), nn.Dropout())
    model[0].requires_grad_(requires_grad=False)
    model[1].packed = nn.Parameter(torch.arange(9, dtype=torch.int8, device=DEVICE), requires_grad=False)
    model[1].eval()
    wanted = [(name, p.requires_grad) for name, p in model.named_parameters()]
    assert {flag for _, flag in wanted} == {True, False}
    for _ in range(2):
        handle = mgr.register("model", model)
        for move in (handle.evict, handle.load, handle.evict):
            move()
            assert [(name, p.requires_grad) for name, p in model.named_parameters()] == wanted
            assert [module.training for module in model.modules()] == [True, True, False, True]
            assert model[1].packed.tolist() == list(range(9))
        handle.forget()
    assert [(name, p.requires_grad) for name, p in model.named_parameters()] == wanted


class WithState(nn.Linear):
    """As Transformer Engine's layers: a piece of state that is no tensor, under a key of the state dict."""

    def __init__(self, state: object) -> None:
        super().__init__(8, 8, device=DEVICE)
        self.state, self.calls = state, []

    def get_extra_state(self) -> object:
        self.calls.append("get")
        return self.state

    def set_extra_state(self, state: object) -> None:
        self.calls.append("set")


# case: extra-state
@pytest.mark.parametrize("state", [{"amax": 1}, b"amax", None], ids=repr)
def test_moves_neither_ask_for_extra_state_nor_set_it(mgr, state):
    model = WithState(state)
    handle = mgr.register("model", model)
    for move in (handle.evict, handle.load, handle.evict):
        move()
    assert model.state is state
    assert model.calls == []
    assert handle.device_bytes == 0


# --- modes, random numbers --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def all_at_once() -> Iterator[None]:
    with torch.inference_mode(), torch.autocast(DEVICE), torch.device("meta"), default_dtype():
        yield


MODES = {
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast(DEVICE),
    "torch.device": lambda: torch.device("meta"),
    "default device": default_device,
    "default dtype": default_dtype,
    "all at once": all_at_once,
}


def learn(net: nn.Module) -> None:
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    net(torch.linspace(-1, 1, 16, device=DEVICE).view(2, 8)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


# case: inference-mode-reload
@pytest.mark.parametrize("mode", MODES.values(), ids=list(MODES))
@pytest.mark.parametrize("way", ["call", "load", "evict and load"])
def test_a_move_under_any_mode_leaves_plain_weights_that_learn_as_an_untouched_twin(mgr, mode: Callable, way):
    model, twin = (nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)).to(DEVICE) for _ in range(2))
    twin.load_state_dict(model.state_dict())
    model.eval(), twin.eval()
    x = torch.randn(2, 8, device=DEVICE)
    handle = mgr.register("model", model)
    if way != "evict and load":
        handle.evict()
    with mode():
        if way == "evict and load":
            assert handle.evict() == handle.total_bytes
        if way == "call":
            model(x)
        else:
            handle.load()
    assert handle.state == "device"
    assert not any(tensor.is_inference() for tensor in tensors(model))
    assert [(t.dtype, t.device, t.requires_grad) for t in tensors(model)] == [
        (t.dtype, t.device, t.requires_grad) for t in tensors(twin)
    ]
    for net in (model, twin):
        learn(net.train())
        net[0].weight.data.add_(1)
    assert all(torch.equal(mine, right) for mine, right in zip(tensors(model), tensors(twin), strict=True))


# case: rng-and-train-flag
@pytest.mark.parametrize("move", ["call", "load", "evict"])
def test_a_seed_gives_the_same_numbers_whatever_moved_since(mgr, move):
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.Linear(8, 8)).to(DEVICE), torch.ones(2, 8, device=DEVICE)
    model.eval()
    model[1].train()
    handle = mgr.register("model", model)
    moves = {"call": lambda: model[0](x), "load": handle.load, "evict": handle.evict}
    drawn = []
    for happens in (False, True):
        if move != "evict":
            handle.evict()
        torch.manual_seed(0), random.seed(0), np.random.seed(0)  # noqa: NPY002  the global stream is what is asked about
        if happens:
            moves[move]()
        drawn.append(
            (torch.rand(4).tolist(), torch.rand(4, device=DEVICE).tolist(), random.random(), np.random.rand())  # noqa: NPY002
        )
    assert drawn[0] == drawn[1]
    assert [module.training for module in model.modules()] == [False, False, True, False]
    model.eval()
    first = model(x)
    handle.evict()
    assert torch.equal(model(x), first)


# --- recurrent layers -------------------------------------------------------------------------------------------------


# case: lstm-flat-weights
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_recurrent_layers_own_list_of_weights_holds_nothing_back_and_stays_true(mgr, kind):
    torch.manual_seed(0)
    model, x = kind(16, 64, 2, bidirectional=True, device=DEVICE), torch.randn(5, 3, 16, device=DEVICE)
    twin = kind(16, 64, 2, bidirectional=True, device=DEVICE)
    twin.load_state_dict(model.state_dict())
    own = [weakref.ref(weight) for weight in model._flat_weights]
    handle = mgr.register("model", model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "RNN module weights are not part of single contiguous chunk of memory"
        for _ in range(3):
            used = mgr.used_bytes
            assert handle.evict() == handle.total_bytes
            assert mgr.used_bytes == used - footprint(*[weight.nbytes for weight in model.parameters()])
            assert all(flat is reference() for flat, reference in zip(model._flat_weights, own, strict=True))
            for net in (model, twin):
                out = net(x)[0]
                out.square().sum().backward()
                del out
                torch.optim.SGD(net.parameters(), lr=0.01).step()
                net.zero_grad()
    assert all(
        same_values(mine.detach(), right) for mine, right in zip(model.parameters(), twin.parameters(), strict=True)
    )
    assert [id(flat) for flat in model._flat_weights] == [id(weight) for weight in model.parameters()]
    model._apply(lambda weight: weight + 0)  # every weight is put in its place anew, as `to` does
    handle.evict()
    assert torch.equal(model(x)[0], twin(x)[0])
