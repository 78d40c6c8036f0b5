"""Small cases of public bug reports: evicted models that were read, converted or called in ways nobody thought of.

Without these, a placeholder without data reaches somebody's computation, or a model is called that is not there. Each
test names the report that it is about.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from place import DEVICE, same_values
from torch import nn
from torch.nn import functional

from vram_magic.residency.arriving import Arriving

X = torch.linspace(-1, 1, 64, device=DEVICE).view(4, 16)


@pytest.fixture
def manager_options():
    return {"block_bytes": "64KiB", "host_budget": 0}


@pytest.fixture
def loads(monkeypatch) -> list[int]:
    """Fills with the number of weights of each load."""
    counts, load = [], Arriving.load

    def counted(self, spans, reservation):
        counts.append(len(spans))
        return load(self, spans, reservation)

    monkeypatch.setattr(Arriving, "load", counted)
    return counts


def layer(width: int = 16) -> nn.Linear:
    return nn.Linear(width, width, device=DEVICE)


# --- reading a weight that is out -------------------------------------------------------------------------------------

READS: dict[str, Callable[[nn.Module], object]] = {
    "weight + 1": lambda model: model.weight + 1,
    "data": lambda model: model.weight.data * 2,
    "clone": lambda model: model.weight.clone(),
    "cpu": lambda model: model.weight.cpu(),
    "to a device": lambda model: model.weight.to(DEVICE),
    "to a dtype": lambda model: model.weight.to(torch.float64),
    "numpy": lambda model: torch.from_numpy(model.weight.detach().cpu().numpy().copy()),
    "tolist": lambda model: torch.tensor(model.weight.tolist()),
    "item": lambda model: torch.tensor(model.weight[3, 5].item()),
    "new tensor": lambda model: torch.as_tensor(model.weight.detach()),
    "stack": lambda model: torch.stack([model.weight, model.weight]),
    "norm": lambda model: nn.utils.parameters_to_vector(model.parameters()),
    "state dict": lambda model: model.state_dict()["weight"],
}


# case: meta-copy-error
@pytest.mark.parametrize("read", READS.values(), ids=list(READS))
def test_whoever_reads_an_evicted_weight_gets_its_values_and_the_model_stays_loadable(mgr, read):
    model, twin = layer(), layer()
    twin.load_state_dict(model.state_dict())
    handle = mgr.register("model", model)
    handle.evict()
    for _ in range(2):
        result = read(model)
        assert result.device.type != "meta"
        assert same_values(result.detach(), read(twin).detach())
        del result
        handle.load()
        assert torch.equal(model(X), twin(X))
        handle.evict()
        assert handle.device_bytes == 0, handle.why()


CONVERSIONS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "to('cpu')": lambda model: model.to("cpu"),
    "cpu()": lambda model: model.cpu(),
    "half()": lambda model: model.half(),
    "bfloat16()": lambda model: model.bfloat16(),
    "to(dtype)": lambda model: model.to(torch.float64),
    "requires_grad_()": lambda model: model.requires_grad_(requires_grad=False),
    "share_memory()": lambda model: model.share_memory(),
}


# case: meta-copy-error
@pytest.mark.parametrize("convert", CONVERSIONS.values(), ids=list(CONVERSIONS))
def test_an_evicted_model_that_is_converted_has_true_values_and_can_be_loaded_and_called(mgr, convert):
    model, twin = layer(), layer()
    twin.load_state_dict(model.state_dict())
    handle = mgr.register("model", model)
    handle.evict()
    assert convert(model) is model
    convert(twin).to(DEVICE)
    x = X.to(twin.weight.dtype)
    for _ in range(2):
        assert same_values(model.weight.detach(), twin.weight.detach())
        handle.load()
        assert torch.equal(model(x), twin(x))
        handle.evict()


# case: meta-copy-error
def test_a_move_to_the_meta_device_loses_what_it_always_loses_and_no_more(mgr):
    model, other = layer(), layer()
    for name, module in (("model", model), ("other", other)):
        mgr.register(name, module).evict()
    model.to("meta")
    assert model.weight.device.type == "meta"
    assert "meta" in mgr["model"].why()
    assert other(X).device.type == DEVICE
    model.to_empty(device=DEVICE)
    model.load_state_dict(other.state_dict())
    assert torch.equal(model(X), other(X))


class Direct(nn.Module):
    """Its methods read weights without calling the modules that own them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.table = layer(), nn.Embedding(32, 16, padding_idx=0, device=DEVICE)
        self.conv = nn.Conv1d(4, 8, 3, device=DEVICE)

    def matmul(self) -> torch.Tensor:
        return X @ self.linear.weight

    def convolution(self) -> torch.Tensor:
        return functional.conv1d(X[None], self.conv.weight, self.conv.bias)

    def padding(self) -> torch.Tensor:
        return self.table.weight[self.table.padding_idx] + functional.embedding(
            torch.arange(4, device=DEVICE), self.table.weight
        )

    def placed(self) -> torch.Tensor:
        """Made where the weight is, as many libraries make their masks and inputs."""
        x = torch.ones(2, 16, device=self.linear.weight.device, dtype=self.linear.weight.dtype)
        return functional.linear(x, self.linear.weight, self.linear.bias)


# case: silent-meta-output
@torch.no_grad()
@pytest.mark.parametrize("method", ["matmul", "convolution", "padding", "placed"])
def test_a_method_that_uses_weights_of_modules_it_does_not_call_computes_as_ever(mgr, loads, method):
    model = Direct()
    expected = getattr(model, method)()
    handle = mgr.register("model", model)
    for _ in range(2):
        handle.evict()
        loads.clear()
        result = getattr(model, method)()
        assert result.device.type == DEVICE
        assert torch.equal(result, expected)
        assert (handle.state, handle.in_use, len(loads)) == ("device", False, 1)


# --- ways in ----------------------------------------------------------------------------------------------------------


class Layer(nn.Linear):
    """Asks something each time that it computes."""

    def __init__(self) -> None:
        super().__init__(16, 16, device=DEVICE)
        self.ask, self.answers = lambda: None, []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.answers.append(self.ask())
        return super().forward(x)


class Speaker(nn.Module):
    """`generate` and `encode` call a child only, as pipelines do."""

    def __init__(self) -> None:
        super().__init__()
        self.child, self.other = Layer(), layer()

    def generate(self, x: torch.Tensor) -> torch.Tensor:
        return self.child(self.child(x))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.generate(x) + 1


WAYS_IN: dict[str, Callable[[Speaker], torch.Tensor]] = {
    "generate": lambda model: model.generate(X),
    "encode": lambda model: model.encode(X),
    "child": lambda model: model.child(X),
    "child's forward": lambda model: model.child.forward(X),
}


# case: entry-points-other-than-forward
@torch.no_grad()
@pytest.mark.parametrize("way", WAYS_IN)
def test_every_way_in_brings_an_evicted_model_once_and_holds_it_to_the_end(mgr, loads, way):
    model = Speaker()
    expected = WAYS_IN[way](model)
    handle = mgr.register("model", model)
    for _ in range(2):
        handle.evict()
        loads.clear(), model.child.answers.clear()
        model.child.ask = lambda: handle.in_use
        assert torch.equal(WAYS_IN[way](model), expected)
        assert loads == [4]
        assert model.child.answers == [True] * (1 if "child" in way else 2)
        assert (handle.state, handle.in_use) == ("device", False)


# case: entry-points-other-than-forward
@torch.no_grad()
@pytest.mark.parametrize("way", WAYS_IN)
def test_every_way_in_holds_a_model_that_is_there(mgr, way):
    model = Speaker()
    handle = mgr.register("model", model)
    model.child.ask = lambda: handle.in_use
    WAYS_IN[way](model)
    assert model.child.answers
    assert all(model.child.answers)
    assert not handle.in_use


# case: entry-points-other-than-forward
@torch.no_grad()
@pytest.mark.parametrize("way", WAYS_IN)
def test_every_way_in_counts_as_use(mgr, way):
    models = {name: Speaker() for name in ("one", "two")}
    for name, model in models.items():
        mgr.register(name, model)
    for used, left in (("one", "two"), ("two", "one")):
        WAYS_IN[way](models[used])
        assert mgr.plan(mgr.free_bytes + 1).steps[0].model == left


# case: entry-points-other-than-forward
def test_a_weight_of_a_child_is_read_with_its_true_values(mgr):
    model = Speaker()
    weight = model.child.weight.detach().clone()
    mgr.register("model", model).evict()
    assert same_values(model.child.weight.detach(), weight)
    assert mgr["model"].evict() == 0  # reading it where it is brought nothing in


# case: device-reports-storage
@torch.no_grad()
def test_inputs_made_where_the_first_parameter_is_reach_an_evicted_model(mgr):
    model = nn.Sequential(layer(), layer()).double()
    handle = mgr.register("model", model)
    expected = model(torch.ones(4, 16, device=DEVICE, dtype=torch.float64))
    handle.evict()
    first = next(model.parameters())
    assert first.device.type != "meta"
    x = torch.ones(4, 16, device=first.device, dtype=first.dtype)
    del first
    for _ in range(2):
        assert torch.equal(model(x), expected)
        assert model(x).device.type == DEVICE
