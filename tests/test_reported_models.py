"""Small cases of public bug reports: odd things that were registered as models, twice, or with a second owner.

Without these, a model without parameters is refused, shared weights are counted twice, or another tool and we move the
same weights. Each test names the report that it is about.
"""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
from place import DEVICE, footprint
from torch import nn

import vram_magic as vm
from vram_magic.notebook.report import Report

MIB = 1 << 20
X = torch.linspace(-1, 1, 64, device=DEVICE).view(4, 16)


@pytest.fixture
def manager_options():
    return {"block_bytes": "64KiB", "host_budget": 0}


def layer(width: int = 16) -> nn.Linear:
    return nn.Linear(width, width, device=DEVICE)


class Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(512.0, device=DEVICE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table[: x.shape[-1]]


def frozen() -> nn.Module:
    return torch.jit.freeze(torch.jit.script(layer().eval()))


# case: no-parameters
@pytest.mark.filterwarnings("ignore:.*torch.jit")
@torch.no_grad()
def test_what_has_no_parameters_is_managed_shown_and_still_computes(mgr):
    models = {"relu": nn.ReLU(), "buffers": Buffers(), "frozen": frozen(), "lazy": nn.LazyLinear(16, device=DEVICE)}
    expected = {name: models[name](X) for name in ("relu", "buffers", "frozen")}
    for name, model in models.items():
        mgr.register(name, model)
    assert {name: handle.total_bytes for name, handle in mgr.models.items()} == {
        "relu": 0, "buffers": 2048, "frozen": 0, "lazy": 0,
    }  # fmt: skip
    for handle in mgr.models.values():
        handle.evict()
    assert mgr["buffers"].device_bytes == 0
    for name, right in expected.items():
        assert torch.equal(models[name](X), right), name
    first = models["lazy"](X)
    assert mgr["lazy"].total_bytes == (16 * 16 + 16) * 4
    mgr["lazy"].evict()
    assert torch.equal(models["lazy"](X), first)
    assert {row.name for row in Report.of(mgr, fresh=True).rows} == set(models)


class Dispatched(nn.Module):
    """As accelerate leaves a model that is spread over devices and disk."""

    def __init__(self, *, hooked: bool) -> None:
        super().__init__()
        self.here, self.away = layer(), nn.Linear(16, 16, device="meta")
        self.hf_device_map = {"here": 0, "away": "disk"}
        if hooked:
            self.here._hf_hook = SimpleNamespace(execution_device=0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.here(x)

    def to(self, *_: object, **__: object) -> nn.Module:
        raise RuntimeError("You can't move a model that has some modules offloaded to cpu or disk.")


def inside_of(module: nn.Module) -> list[dict[str, object]]:
    return [dict(vars(child)) for child in module.modules()]


# case: dispatch-refuses-move
def test_a_model_that_another_tool_moves_is_refused_and_nothing_of_it_is_touched(mgr):
    model = Dispatched(hooked=True)
    before = inside_of(model)
    with pytest.raises(vm.VRAMError, match="accelerate") as refused:
        mgr.register("model", model)
    assert len(str(refused.value).splitlines()) == 4
    assert "model" not in mgr
    assert inside_of(model) == before


# case: dispatch-refuses-move
@torch.no_grad()
def test_weights_that_are_nowhere_are_left_there_and_named(mgr):
    model = Dispatched(hooked=False)
    expected, before = model(X), inside_of(model)
    handle = mgr.register("model", model)
    handle.evict()
    assert "away.weight (1.0 KiB) cannot leave: on the device meta" in handle.why()
    assert torch.equal(model(X), expected)
    assert model.away.weight.device.type == "meta"
    handle.forget()
    assert inside_of(model) == before


# case: double-enable
def test_the_same_object_twice_is_one_model_under_one_name(notebook):
    notebook.run("net = build(2)\nx = torch.ones(1, 512, device=DEVICE)\nright = net(x).detach().clone()")
    notebook.run("%load_model a net")
    mgr, net = vm.manager(), notebook["net"]
    used, ways_in = mgr.used_bytes, [set(vars(child)) for child in net.modules()]
    notebook.run("h = %load_model a net")
    assert (mgr.used_bytes, [set(vars(child)) for child in net.modules()]) == (used, ways_in)
    assert "One object has one name" in notebook.fail("%load_model b net")
    assert list(mgr.models) == ["a"]
    assert notebook["h"].total_bytes == 2 * MIB
    assert mgr["a"].evict() == 2 * MIB
    notebook.run("same = torch.equal(net(x), right)")
    assert notebook["same"]
    notebook.run("%vram forget a")
    notebook.run("%load_model b net")
    assert list(mgr.models) == ["b"]


class Pipeline:
    """No module itself; it holds some, one of them twice, and other things."""

    def __init__(self, encoder: nn.Module) -> None:
        self.encoder, self.encoder_again, self.decoder = encoder, encoder, layer()
        self.config = {"steps": 4, "name": "pipeline"}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.encoder(x))


# cases: double-enable, shared-submodule, not-a-module
@torch.no_grad()
def test_two_pipelines_over_the_same_parts_count_them_once_and_run_after_either_left(mgr):
    before = mgr.used_bytes
    encoder = layer()
    one, two = Pipeline(encoder), Pipeline(encoder)
    sizes = [p.nbytes for part in (encoder, one.decoder, two.decoder) for p in part.parameters()]
    assert mgr.used_bytes - before == footprint(*sizes)
    right = one(X), two(X)
    unit = sum(p.nbytes for p in encoder.parameters())
    handles = mgr.register("one", one), mgr.register("two", two)
    assert [handle.total_bytes for handle in handles] == [2 * unit, 2 * unit]
    assert mgr.used_bytes - before == footprint(*sizes) + sum(footprint(result.nbytes) for result in right)
    for left, other, x in ((handles[0], two, right[1]), (handles[1], one, right[0])):
        left.evict()
        assert torch.equal(other(X), x)
    assert torch.equal(two(X), right[1])
    for handle in handles:
        handle.evict()
    assert [handle.device_bytes for handle in handles] == [0, 0]
    assert torch.equal(one(X), right[0])
    handles[0].forget()
    assert torch.equal(two(X), right[1])


# case: shared-submodule
def test_all_idle_bytes_leave_where_a_shared_weight_lies_in_one_block_with_others(mgr):
    encoder = layer()
    one, two = Pipeline(encoder), Pipeline(encoder)
    sizes = [p.nbytes for part in (encoder, one.decoder, two.decoder) for p in part.parameters()]
    handles = mgr.register("one", one), mgr.register("two", two)
    before = mgr.used_bytes
    assert mgr.make_room(mgr.free_bytes + sum(sizes)) >= sum(sizes)
    assert before - mgr.used_bytes == footprint(*sizes)
    assert [handle.device_bytes for handle in handles] == [0, 0]


class Immovable(nn.Module):
    """As a model in 4 or 8 bits, which its class forbids to move."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(512, 512, bias=False, device=DEVICE)

    def refuse(self, *_: object, **__: object) -> nn.Module:
        raise ValueError("`.to` is not supported for `4-bit` or `8-bit` bitsandbytes models.")

    to = cuda = cpu = half = _apply = refuse

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


# case: bnb-to-refused
@torch.no_grad()
def test_a_model_that_refuses_to_be_moved_leaves_weight_by_weight(mgr):
    model, next_one = Immovable(), nn.Linear(512, 512, bias=False, device=DEVICE)
    x = torch.ones(2, 512, device=DEVICE)
    expected = model(x)
    handle, other = mgr.register("model", model), mgr.register("next", next_one)
    assert mgr.make_room(mgr.free_bytes + MIB) == MIB
    assert (handle.device_bytes, other.device_bytes) == (0, MIB)
    assert mgr.make_room(mgr.free_bytes + MIB) == MIB
    assert (handle.device_bytes, other.device_bytes) == (0, 0)
    assert torch.equal(model(x), expected)
    assert handle.state == "device"
    handle.forget()
    with pytest.raises(ValueError, match="not supported"):
        model.to(DEVICE)  # it is its own again


# case: compile-and-hooks
@torch.no_grad()
def test_a_compiled_model_and_the_one_inside_are_counted_once(mgr):
    model = nn.Sequential(layer(), layer())
    total, expected = sum(p.nbytes for p in model.parameters()), model(X)
    mgr.register("model", model)
    compiled = torch.compile(model, backend="eager")
    used = mgr.used_bytes
    handle = mgr.register("model", compiled)
    assert list(mgr.models) == ["model"]
    assert (handle.total_bytes, mgr.used_bytes) == (total, used)
    assert handle.evict() == total
    assert not [name for name in handle.why().split() if name.startswith("_orig_mod")]
    assert torch.equal(compiled(X), expected)
    assert torch.equal(model(X), expected)
    assert mgr.register("inner", model).total_bytes == total
    assert mgr.used_bytes <= used + footprint(expected.nbytes)
    torch._dynamo.reset()


# case: captured-addresses
@torch.no_grad()
def test_the_weights_of_a_pinned_model_never_change_their_addresses(mgr):
    models = {name: nn.Sequential(*[nn.Linear(512, 512, bias=False, device=DEVICE) for _ in range(2)]) for name in "ab"}
    captured = [weight.data_ptr() for weight in models["a"].parameters()]
    expected = models["a"](torch.ones(1, 512, device=DEVICE)).tolist()
    pinned, other = mgr.register("a", models["a"], pin=True), mgr.register("b", models["b"], tier="asr")
    with pytest.raises(vm.ModelInUseError):
        pinned.evict()
    mgr.make_room(mgr.free_bytes + MIB)
    with pytest.raises(vm.VRAMOutOfMemoryError):
        mgr.make_room(mgr.free_bytes + 2 * MIB)
    mgr.budget_bytes = mgr.used_bytes + MIB // 2
    pinned.load()
    room = torch.empty(MIB, dtype=torch.uint8, device=DEVICE)
    assert other.device_bytes == 0
    pinned.residency = "disk"
    assert [weight.data_ptr() for weight in models["a"].parameters()] == captured
    assert models["a"](torch.ones(1, 512, device=DEVICE)).tolist() == expected
    assert [weight.data_ptr() for weight in models["a"].parameters()] == captured
    pinned.unpin()
    del room
    assert pinned.evict() == 2 * MIB  # it could have left all the time


# --- TorchScript ------------------------------------------------------------------------------------------------------

SCRIPT = pytest.mark.filterwarnings("ignore:.*torch.jit")


# case: script-module
@SCRIPT
@torch.no_grad()
def test_a_script_module_computes_right_and_says_why_it_stays(mgr):
    model, inner = torch.jit.script(layer(128)), torch.jit.script(layer(128))
    around, x, seen = nn.Sequential(inner), torch.ones(2, 128, device=DEVICE), []
    around.register_forward_pre_hook(lambda module, inputs: seen.append(len(inputs)))
    expected = {module: module(x) for module in (model, around)}
    for name, module in (("model", model), ("around", around)):
        handle = mgr.register(name, module)
        assert handle.total_bytes == (128 * 128 + 128) * 4
        handle.evict()
        assert ("not everything went along" in handle.why()) == bool(handle.device_bytes)
        for _ in range(2):
            assert torch.equal(module(x), expected[module])
    assert seen == [1, 1, 1]
    model.weight.data.zero_()
    mgr["model"].evict()
    assert torch.equal(model(x), model.bias.expand(2, 128))


@SCRIPT
@torch.no_grad()
def test_a_script_module_leaves_and_returns(mgr):
    model, x = torch.jit.script(layer(128)), torch.ones(2, 128, device=DEVICE)
    expected = model(x)
    handle = mgr.register("script", model)
    assert handle.evict() == handle.total_bytes
    assert torch.equal(model(x), expected)


@SCRIPT
def test_a_frozen_script_module_is_said_to_hold_weights_that_cannot_be_seen(mgr):
    model = frozen()
    handle = mgr.register("model", model)
    assert handle.total_bytes == 0
    assert re.search("unknown|frozen|TorchScript", handle.why())
    assert model is not None
