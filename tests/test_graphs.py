"""Autograd graphs over a model's weights: what they hold stays, or is waited for, or is named.

Without this a backward pass finds a weight on the other device, a load waits in vain for a graph that rests, or gives
up on one that is about to end; or every decision takes as long as Python needs to look at a million objects.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import sys

import pytest
import torch
from place import DEVICE
from torch import nn

import vram_magic as vm
from vram_magic.residency import arriving, graphs, living, swap
from vram_magic.residency.spans import survey


class AsAttribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        return gradient @ ctx.weight, None


class InATuple(AsAttribute):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.tensors = (None, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        return gradient @ ctx.tensors[1], None


@pytest.mark.parametrize("function", [AsAttribute, InATuple])
@pytest.mark.parametrize("way", ["evict", "make room", "backward"])
def test_a_frozen_weight_that_a_custom_function_keeps_is_there_for_its_backward(mgr, function, way):
    class Frozen(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(512, 512, device=DEVICE), requires_grad=False)

        def forward(self, x):
            return function.apply(x, self.weight)

    model, x = Frozen(), torch.ones(4, 512, device=DEVICE, requires_grad=True)
    expected = torch.ones(4, 512, device=DEVICE) @ model.weight
    handle = mgr.register("frozen", model)
    loss = model(x).sum()
    if way == "evict":
        handle.evict()
    elif way == "make room":
        with contextlib.suppress(vm.VRAMOutOfMemoryError):
            mgr.make_room(mgr.free_bytes + 1000)
    else:
        mgr.budget_bytes = mgr.used_bytes + 1024
        with contextlib.suppress(torch.OutOfMemoryError):
            loss.backward(retain_graph=True)
        x.grad = None
        mgr.budget_bytes = "1GiB"
    loss.backward()
    assert torch.equal(x.grad, expected)
    del loss
    handle.load()
    assert handle.evict()


@pytest.mark.simulation_only
def test_a_graph_over_evicted_weights_is_told_at_once(mgr, monkeypatch):
    monkeypatch.setattr(arriving, "_PATIENCE_ELSEWHERE_S", 3600)  # how long it waits for an operation
    model, x = nn.Linear(64, 64, device=DEVICE), torch.ones(1, 64, device=DEVICE)
    mgr.register("model", model).evict()
    norms = [weight.norm() for weight in model.parameters()]
    with pytest.raises(vm.ModelInUseError, match="an autograd graph"):
        model(x)
    norms.clear()
    model(x)


@pytest.mark.simulation_only
def test_a_graph_is_waited_for_while_anybody_runs_who_may_end_it(mgr, monkeypatch):
    """A thread that computes now and then also rests now and then."""
    monkeypatch.setattr(arriving, "_PATIENCE_ELSEWHERE_S", 3600)  # a slow machine takes long for the looks below
    model, x = nn.Linear(64, 64, device=DEVICE), torch.ones(1, 64, device=DEVICE)
    mgr.register("model", model).evict()
    norms = [weight.norm() for weight in model.parameters()]
    looks, chance = itertools.count(), random.Random(0)

    def rests():
        if next(looks) == 150:
            norms.clear()
        return chance.random() < 0.5

    for module in (arriving, swap):
        monkeypatch.setattr(module, "frames_rest", rests)
    assert model(x).shape == (1, 64)


def test_the_search_takes_as_many_steps_in_python_however_many_objects_there_are(mgr):
    model = nn.Linear(4, 4, device=DEVICE)
    names = list(model.parameters())
    spans = survey([("", model)], mgr._core.device, lambda _: False)
    few = steps_of(lambda: graphs.kept_for_backward(spans))
    objects = [[] for _ in range(10_000)]
    assert steps_of(lambda: graphs.kept_for_backward(spans)) == few
    assert few > 5
    assert len(names) == 2
    assert len(objects) == 10_000


def steps_of(job):
    """How many lines of its own it runs."""
    steps = []

    def trace(frame, event, _argument):
        if frame.f_code.co_filename not in {graphs.__file__, living.__file__}:
            return None
        if event == "line":
            steps.append(frame.f_lineno)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        job()
    finally:
        sys.settrace(before)
    return len(steps)
