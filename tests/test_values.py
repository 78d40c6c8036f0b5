"""After any number of round trips a model is bit for bit what it was: values, ties, dtypes, flags, identities.

Without this, weights come back untied, frozen weights become trainable, buffers hold noise, and nobody is told.
"""

from __future__ import annotations

import random

import pytest
import torch
from place import DEVICE, same_values
from torch import nn
from torch.nn.utils import parametrizations

import vram_magic as vm


@pytest.fixture
def manager_options():
    return {"block_bytes": "64KiB"}


def round_trip(mgr: vm.VRAMManager, model: nn.Module) -> vm.Handle:
    handle = mgr.register("model", model)
    for _ in range(2):
        handle.evict()
        assert handle.device_bytes == 0, handle.why()
        handle.load()
        assert handle.state == "device"
    return handle


DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.bool,
    torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
]  # fmt: skip


@pytest.mark.parametrize("shape", [(3, 5), (), (0,), (0, 5)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_shape_comes_back_byte_for_byte(mgr, dtype, shape):
    model = nn.Module()
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8, device=DEVICE)
    model.register_buffer("value", raw.clone().view(dtype).view(shape))
    buffer = model.value
    round_trip(mgr, model)
    assert model.value is buffer
    assert (buffer.dtype, buffer.shape) == (dtype, torch.Size(shape))
    assert torch.equal(buffer.contiguous().view(-1).view(torch.uint8), raw)


def test_ties_stay_ties_and_are_counted_once(mgr):
    model = nn.Sequential(nn.Embedding(64, 32, device=DEVICE), nn.Linear(32, 64, bias=False, device=DEVICE))
    model[1].weight = model[0].weight
    handle = mgr.register("model", model)
    assert handle.total_bytes == 64 * 32 * 4
    for move in (handle.evict, handle.load):
        move()
        assert model[0].weight is model[1].weight


def test_two_parameters_over_one_storage_stay_so(mgr):
    base = torch.randn(16, device=DEVICE)
    model = nn.Module()
    model.head, model.tail = nn.Parameter(base[:9]), nn.Parameter(base[7:])
    model.whole = nn.Parameter(base)
    del base
    before = model.whole.detach().clone()
    handle = round_trip(mgr, model)
    assert handle.total_bytes == 16 * 4
    assert torch.equal(model.whole, before)
    with torch.no_grad():
        model.head[8] = 42
    assert model.tail[1] == 42
    handle.evict()
    assert model.tail[1] == 42


def test_buffers_that_are_not_saved_come_back(mgr):
    model = nn.Linear(4, 4, device=DEVICE)
    model.register_buffer("frequencies", torch.randn(100, device=DEVICE), persistent=False)
    before = model.frequencies.clone()
    round_trip(mgr, model)
    assert torch.equal(model.frequencies, before)


def test_strides_of_channels_last_and_transposed_weights_stay(mgr):
    model = nn.Conv2d(8, 16, 3, device=DEVICE).to(memory_format=torch.channels_last)
    model.turned = nn.Parameter(torch.randn(6, 7, device=DEVICE).t())
    before = model.weight.detach().clone(), model.weight.stride(), model.turned.stride()
    round_trip(mgr, model)
    assert torch.equal(model.weight, before[0])
    assert (model.weight.stride(), model.turned.stride()) == before[1:]


def test_flags_hooks_and_identities_stay(mgr):
    model = nn.Sequential(nn.Linear(4, 4, device=DEVICE), nn.Dropout(), nn.BatchNorm1d(4, device=DEVICE)).eval()
    model[0].weight.requires_grad_(requires_grad=False)
    model[2].train()
    calls = []
    model[0].register_forward_hook(lambda *_: calls.append(1))
    ids = [id(tensor) for tensor in [*model.parameters(), *model.buffers()]]
    round_trip(mgr, model)
    model(torch.randn(3, 4, device=DEVICE))
    assert calls == [1]
    assert [id(tensor) for tensor in [*model.parameters(), *model.buffers()]] == ids
    assert not model[0].weight.requires_grad
    assert model[0].bias.requires_grad
    assert [module.training for module in model.modules()] == [False, False, False, True]


def test_an_lstm_computes_the_same_and_keeps_no_copy(mgr):
    model, x = nn.LSTM(16, 32, 2, device=DEVICE), torch.randn(5, 3, 16, device=DEVICE)
    with torch.no_grad():
        expected = model(x)[0]
        handle = mgr.register("model", model)
        used = mgr.used_bytes
        handle.evict()
        assert mgr.used_bytes == used - handle.total_bytes
        assert all(flat is own for flat, own in zip(model._flat_weights, model.parameters(), strict=True))
        assert torch.equal(model(x)[0], expected)


@pytest.mark.parametrize("wrap", [parametrizations.weight_norm, parametrizations.orthogonal, nn.utils.spectral_norm])
def test_parametrized_weights_compute_the_same(mgr, wrap):
    model, x = wrap(nn.Linear(8, 8, device=DEVICE)).eval(), torch.randn(3, 8, device=DEVICE)
    with torch.no_grad():
        expected = model(x)
        handle = mgr.register("model", model)
        handle.evict()
        assert torch.equal(model(x), expected)


def test_training_after_round_trips_is_that_of_an_undisturbed_twin(mgr):
    torch.manual_seed(0)
    model, twin = nn.Linear(8, 8, device=DEVICE), nn.Linear(8, 8, device=DEVICE)
    twin.load_state_dict(model.state_dict())
    handle = mgr.register("model", model)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.1) for m in (model, twin)]
    for _ in range(4):
        x = torch.randn(4, 8, device=DEVICE)
        for m, optimizer in zip((model, twin), optimizers, strict=True):
            optimizer.zero_grad()
            m(x).square().sum().backward()
            optimizer.step()
        handle.evict()
    assert torch.equal(model.weight, twin.weight)
    assert torch.equal(model.bias, twin.bias)


@pytest.mark.parametrize(
    "context",
    [
        torch.inference_mode,
        torch.no_grad,
        lambda: torch.autocast(DEVICE),
        lambda: torch.device("meta"),
    ],
    ids=["inference_mode", "no_grad", "autocast", "torch.device"],
)
def test_a_reload_inside_a_mode_leaves_no_trace_of_it(mgr, context):
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(DEVICE), torch.randn(2, 8, device=DEVICE)
    handle = mgr.register("model", model)
    handle.evict()
    with context():
        model(x)
    assert handle.state == "device"
    assert not any(p.is_inference() for p in model.parameters())
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    model(x).sum().backward()
    assert model[0].weight.grad is not None


def test_moves_draw_no_random_numbers(mgr):
    model = nn.Linear(8, 8, device=DEVICE)
    handle = mgr.register("model", model)
    streams = [torch, torch.cuda] if DEVICE == "cuda" else [torch]
    states = [stream.get_rng_state() for stream in streams], random.getstate()
    handle.evict()
    model(torch.ones(2, 8, device=DEVICE))
    assert all(torch.equal(stream.get_rng_state(), state) for stream, state in zip(streams, states[0], strict=True))
    assert random.getstate() == states[1]


def test_extra_state_is_not_touched(mgr):
    class WithState(nn.Linear):
        state = ("amax", 1)

        def get_extra_state(self):
            return self.state

        def set_extra_state(self, state):
            raise AssertionError("a move is no load_state_dict")

    model = WithState(4, 4)
    round_trip(mgr, model)
    assert model.get_extra_state() is WithState.state


@pytest.mark.parametrize(
    ("name", "value"),
    [("sparse", torch.eye(4).to_sparse()), ("meta", torch.empty(4, device="meta"))],
)
def test_what_cannot_leave_does_not_keep_the_rest(mgr, name, value):
    model = nn.Linear(64, 64, device=DEVICE)
    model.register_buffer(name, value)
    handle = mgr.register("model", model)
    handle.evict()
    assert handle.state == "host"
    assert name in handle.why()
    handle.load()
    assert handle.state == "device"


def test_models_without_weights_and_lazy_ones_are_managed(mgr):
    mgr.register("relu", relu := nn.ReLU())
    assert (mgr["relu"].total_bytes, mgr["relu"].state) == (0, "device")
    assert mgr["relu"].evict() == 0
    mgr.register("lazy", lazy := nn.LazyLinear(8, device=DEVICE))
    assert mgr["lazy"].total_bytes == 0
    lazy(torch.randn(2, 4, device=DEVICE))
    assert mgr["lazy"].total_bytes == (4 * 8 + 8) * 4
    assert relu is not None


def test_a_script_module_stays_resident_and_computes(mgr):
    model, x = torch.jit.script(nn.Linear(8, 8, device=DEVICE)), torch.randn(2, 8, device=DEVICE)
    expected = model(x)
    handle = mgr.register("model", model)
    handle.evict()
    assert torch.equal(model(x), expected)


def test_an_adapter_added_while_resident_or_evicted_is_picked_up(mgr):
    model, x = nn.Sequential(nn.Linear(8, 8, device=DEVICE)), torch.randn(2, 8, device=DEVICE)
    handle = mgr.register("model", model)
    before = handle.total_bytes
    model.append(nn.Linear(8, 8, device=DEVICE))
    assert handle.total_bytes == 2 * before
    handle.evict()
    assert handle.device_bytes == 0
    model.append(nn.Linear(8, 8, device=DEVICE))
    assert handle.total_bytes == 3 * before
    assert model(x).shape == (2, 8)
    assert handle.device_bytes == 3 * before


@pytest.mark.parametrize("method", ["half", "double", "cpu", "float"])
def test_conversions_of_an_evicted_model_give_true_values(mgr, method):
    model = nn.Linear(16, 16, device=DEVICE)
    twin = nn.Linear(16, 16, device=DEVICE)
    twin.load_state_dict(model.state_dict())
    mgr.register("model", model).evict()
    assert same_values(getattr(model, method)().weight, getattr(twin, method)().weight)
    mgr["model"].evict()
    assert same_values(model.weight, twin.weight)


def test_a_method_that_reads_a_weight_without_calling_its_module_sees_true_values(mgr):
    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(8, 8, device=DEVICE)

        def project(self, x):
            return x @ self.inner.weight

    model, x = Reader(), torch.randn(2, 8, device=DEVICE)
    with torch.no_grad():
        expected = model.project(x)
        handle = mgr.register("model", model)
        handle.evict()
        weight = model.inner.weight
        assert torch.equal((x.to(weight.device) @ weight).to(DEVICE), expected)
        del weight
        assert handle.state == "host"
        assert torch.equal(model.project(x), expected)
    assert handle.state == "device"


def test_numpy_sees_true_values_of_an_evicted_weight(mgr):
    model = nn.Linear(8, 8, device=DEVICE)
    before = model.weight.detach().clone()
    mgr.register("model", model).evict()
    assert (model.weight.detach().numpy() == before.cpu().numpy()).all()


def test_an_object_with_slots_that_holds_modules_is_managed(mgr):
    class Pipeline:
        __slots__ = ("decoder", "encoder")

    pipeline = Pipeline()
    pipeline.encoder, pipeline.decoder = nn.Linear(8, 8, device=DEVICE), nn.Linear(8, 8, device=DEVICE)
    handle = mgr.register("pipeline", pipeline)
    assert handle.total_bytes == 2 * (8 * 8 + 8) * 4
    handle.evict()
    pipeline.decoder(torch.ones(1, 8, device=DEVICE))
    assert handle.state == "device"


def test_an_object_has_one_name(mgr):
    model = nn.Linear(8, 8, device=DEVICE)
    mgr.register("a", model)
    assert mgr.register("a", model).model is model
    with pytest.raises(vm.VRAMError, match="One object has one name"):
        mgr.register("b", model)
    assert list(mgr.models) == ["a"]


def test_a_model_that_accelerate_moves_is_refused_unchanged(mgr):
    from accelerate import cpu_offload

    model = nn.Sequential(nn.Linear(8, 8, device=DEVICE))
    cpu_offload(model, execution_device=torch.device(DEVICE))
    with pytest.raises(vm.VRAMError, match="accelerate"):
        mgr.register("model", model)
    assert "model" not in mgr


@pytest.mark.parametrize("order", ["compiled before", "compiled after"])
def test_compiled_models_are_right_and_not_compiled_again_and_again(mgr, order):
    torch._dynamo.reset()
    frames = []

    def backend(graph, _):
        frames.append(1)
        return graph.forward

    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).to(DEVICE), torch.randn(2, 8, device=DEVICE)
    with torch.no_grad():
        expected = model(x)
        if order == "compiled before":
            compiled = torch.compile(model, backend=backend)
            handle = mgr.register("model", model)
        else:
            handle = mgr.register("model", model)
            compiled = torch.compile(model, backend=backend)
        counts = []
        for _ in range(4):
            assert torch.equal(compiled(x), expected)
            handle.evict()
            assert torch.equal(compiled(x), expected)
            handle.load()
            counts.append(len(frames))
    assert counts[-1] == counts[1]


# --- weights that are put aside while the model is out ---------------------------------------------------------------


def one_layer():
    return nn.Linear(64, 64).to(DEVICE).requires_grad_(requires_grad=False)


def test_a_call_with_other_weights_leaves_those_that_are_out_as_they_were(mgr):
    model, x = one_layer(), torch.ones(1, 64, device=DEVICE)
    right = model(x)
    handle = mgr.register("model", model)
    zeros = {name: torch.zeros_like(weight) for name, weight in model.named_parameters()}
    handle.evict()
    spilled = mgr.spilled_bytes
    assert not torch.func.functional_call(model, zeros, (x,)).any()
    assert torch.equal(model(x), right)
    handle.evict()
    torch.func.functional_call(model, zeros, (x,))
    assert (handle.state, mgr.spilled_bytes, handle.device_bytes) == ("host", spilled, 0)


def test_a_weight_that_is_put_back_by_hand_is_found(mgr):
    model, x = one_layer(), torch.ones(1, 64, device=DEVICE)
    right = model(x)
    mgr.register("model", model).evict()
    kept, model.weight = model.weight, nn.Parameter(torch.zeros(64, 64, device=DEVICE), requires_grad=False)
    assert torch.equal(model(x)[0], model.bias)
    model.weight = kept
    assert torch.equal(model(x), right)
    del kept
    assert mgr["model"]._managed.surely_complete
