"""Managed objects whose class is defined anew, or copies and pickles in its own way.

Without these a cell that is run again has no effect on a managed model, or the copy of a copy is the original.
"""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from place import DEVICE
from torch import fx, nn
from torch.nn.utils import parametrize

X = torch.ones(4, 64, device=DEVICE)
places = pytest.mark.parametrize("place", ["device", "evicted"])


def managed(mgr, model, place):
    handle = mgr.register("model", model.to(DEVICE))
    if place == "evicted":
        handle.evict()
    return model


@pytest.fixture
def net():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def forward(self, x):
            return self.layer(x)

        def twice(self, x):
            return 2 * self.layer(x)

    return Net


@places
def test_a_method_that_the_class_gets_anew_is_the_one_that_runs(mgr, net, place):
    model = managed(mgr, net(), place)
    before = model(X)
    net.forward = lambda self, x: self.layer(x) + 1
    net.twice = lambda self, x, times=3: times * self.layer(x)
    mgr["model"].evict()
    assert torch.equal(model(X), before + 1)
    assert torch.equal(model.twice(X), 3 * before)
    assert torch.equal(model.twice(x=X.cpu(), times=4), 4 * before)
    assert mgr["model"].state == "device"


@places
def test_a_class_that_an_object_gets_anew_is_the_one_whose_methods_run(mgr, net, place):
    class New(net):
        def forward(self, x):
            return super().forward(x) + 1

    model = managed(mgr, net(), place)
    before = model(X)
    model.__class__ = New
    assert torch.equal(model(X), before + 1)
    assert mgr["model"].state == "device"


@places
def test_a_graph_that_is_edited_and_compiled_anew_is_what_runs(mgr, place):
    model = managed(mgr, fx.symbolic_trace(nn.Sequential(nn.Linear(64, 64), nn.ReLU())), place)
    before = model.get_submodule("0")(X) if place == "device" else None
    node = next(node for node in model.graph.nodes if node.target == "1")
    node.replace_all_uses_with(node.args[0])
    model.graph.erase_node(node)
    model.recompile()
    result = model(X)
    assert result.min() < 0
    assert before is None or torch.equal(result, before)


class CopiesItsDict(nn.Linear):
    def __deepcopy__(self, memo):
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        new.__dict__ = copy.deepcopy(self.__dict__, memo)
        return new


class NestsItsState(nn.Linear):
    def __getstate__(self):
        return {"inner": self.__dict__.copy()}

    def __setstate__(self, state):
        self.__dict__.update(state["inner"])


@places
@pytest.mark.parametrize("kind", [CopiesItsDict, NestsItsState])
def test_a_copy_of_a_copy_is_the_copys(mgr, kind, place):
    model = managed(mgr, kind(64, 64), place)
    first = copy.deepcopy(model)
    with torch.no_grad():
        first.weight.zero_()
    for second in (copy.deepcopy(first), pickle.loads(pickle.dumps(first)), copy.copy(first)):
        assert not second.weight.any()
    again = pickle.loads(pickle.dumps(model))
    assert torch.equal(again.weight.cpu(), model.weight.cpu())
    assert torch.equal(again.to(DEVICE)(X), model(X))


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


@places
def test_a_copy_without_its_parametrization_can_be_copied_and_pickled(mgr, place):
    model = nn.Linear(64, 64)
    parametrize.register_parametrization(model, "weight", Doubled())
    model = managed(mgr, model, place)
    weight = model.weight.detach().cpu().clone()
    first = copy.deepcopy(model)
    parametrize.remove_parametrizations(first, "weight")
    for second in (first, copy.deepcopy(first)):
        assert torch.equal(second.weight.cpu(), weight)
        assert pickle.dumps(second.state_dict())
