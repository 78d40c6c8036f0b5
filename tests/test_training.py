"""A model in training is never broken: gradients, optimizers and live graphs see the real weights, wherever they were.

Without this a step changes tensors that nobody computes with, or a backward pass reads weights that have left.
"""

from __future__ import annotations

import copy
import itertools
import threading

import pytest
import torch
from place import DEVICE, footprint, same_values
from torch import nn
from torch.utils.checkpoint import checkpoint

import vram_magic as vm

SIZE = 128
X = torch.arange(4.0 * SIZE, device=DEVICE).view(4, SIZE).cos()


@pytest.fixture
def manager_options():
    return {"block_bytes": "64KiB"}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh(), nn.Linear(SIZE, SIZE), nn.Tanh(), nn.Linear(SIZE, 1)).to(
        DEVICE
    )


@pytest.fixture
def pair(mgr) -> tuple[nn.Sequential, nn.Sequential]:
    """Two that are equal; the first is managed."""
    model = net()
    twin = copy.deepcopy(model)
    mgr.register("model", model)
    return model, twin


def same(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(same_values(mine.detach(), right.detach()) for mine, right in pairs)


def same_gradients(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(same_values(mine.grad, right.grad) for mine, right in pairs)


def ask_to_leave(mgr: vm.VRAMManager, how: str) -> None:
    """Every way by which a model is made to leave; whether it does is the manager's decision."""
    if how == "evict":
        mgr["model"].evict()
    elif how == "half":
        try:
            mgr.make_room(mgr.free_bytes + footprint(SIZE * SIZE * 4))
        except vm.VRAMOutOfMemoryError:
            assert mgr["model"].state == "device"  # it is needed: then nothing has moved
    else:
        setting = mgr.budget_bytes
        try:
            mgr.budget_bytes = mgr.used_bytes
            try:
                torch.empty(SIZE * SIZE, device=DEVICE)
            except torch.OutOfMemoryError:
                assert mgr["model"].state == "device"
        finally:
            mgr.budget_bytes = setting


LEAVE = ["evict", "half", "pressure"]
OPTIMIZERS = {
    "sgd with momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "adam, one by one": lambda parameters: torch.optim.Adam(parameters, lr=0.01, foreach=False),
    "adamw, amsgrad": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, amsgrad=True),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, centered=True),
}


# cases: optimizer-stale
@pytest.mark.parametrize("how", LEAVE)
@pytest.mark.parametrize("make", ["sgd with momentum", "adam"])
@pytest.mark.parametrize("moment", ["before forward", "before backward", "before step", "after step"])
def test_a_step_updates_the_real_weights_whenever_the_model_was_asked_to_leave(mgr, pair, make, moment, how):
    optimizers = [OPTIMIZERS[make](module.parameters()) for module in pair]
    ids = [id(parameter) for parameter in pair[0].parameters()]
    for _ in range(2):
        for module, optimizer in zip(pair, optimizers, strict=True):
            mine = module is pair[0]
            if mine and moment == "before forward":
                ask_to_leave(mgr, how)
            loss = module(X).square().mean()
            if mine and moment == "before backward":
                ask_to_leave(mgr, how)
            loss.backward()
            del loss
            if mine and moment == "before step":
                ask_to_leave(mgr, how)
            optimizer.step()
            optimizer.zero_grad()
            if mine and moment == "after step":
                ask_to_leave(mgr, how)
        assert same(*pair)
    mgr["model"].load()
    assert same(*pair)
    assert [id(parameter) for parameter in pair[0].parameters()] == ids


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=list(OPTIMIZERS))
def test_an_optimizers_state_and_the_weights_belong_together_over_round_trips(mgr, pair, make):
    optimizers = [make(module.parameters()) for module in pair]
    for _ in range(3):
        for module, optimizer in zip(pair, optimizers, strict=True):
            module(X).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert mgr["model"].evict() == mgr["model"].total_bytes
    assert same(*pair)


def test_a_model_at_rest_does_leave(mgr, pair):
    """Else the test above would say nothing."""
    optimizer = torch.optim.Adam(pair[0].parameters())
    pair[0](X).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert mgr["model"].evict() == mgr["model"].total_bytes


@pytest.mark.parametrize("how", LEAVE)
def test_gradients_are_right_when_it_was_asked_to_leave_between_forward_and_backward(mgr, pair, how):
    results = [module(X).square().sum() for module in pair]
    ask_to_leave(mgr, how)
    for result in results:
        result.backward(retain_graph=True)
    assert same_gradients(*pair)
    ask_to_leave(mgr, how)
    for result in results:
        result.backward()  # a second time over the same graph: gradients add up
    assert same_gradients(*pair)


@pytest.mark.parametrize("how", LEAVE)
def test_gradients_of_gradients_are_right(mgr, pair, how):
    def penalty(module: nn.Module, *, mine: bool) -> torch.Tensor:
        x = X.clone().requires_grad_()
        (first,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
        if mine:
            ask_to_leave(mgr, how)
        return first.square().sum()

    for module in pair:
        penalty(module, mine=module is pair[0]).backward()
    for mine, right in zip(pair[0].parameters(), pair[1].parameters(), strict=True):
        assert (mine.grad is None) == (right.grad is None)
        assert mine.grad is None or same_values(mine.grad, right.grad)


@pytest.mark.parametrize("how", LEAVE)
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_forward_that_is_run_again_finds_its_weights(mgr, pair, reentrant, how):
    for module in pair:
        x = X.clone().requires_grad_()
        result = checkpoint(module, x, use_reentrant=reentrant).square().sum()
        if module is pair[0]:
            ask_to_leave(mgr, how)
        result.backward()
    assert same_gradients(*pair)


@pytest.mark.parametrize("how", LEAVE)
def test_gradients_that_are_summed_over_batches_survive(mgr, pair, how):
    for scale in (1, 2, 3):
        for module in pair:
            module(X * scale).square().sum().backward()
        ask_to_leave(mgr, how)
    assert same_gradients(*pair)


def test_a_frozen_base_with_a_trained_head_leaves_and_learns(mgr, pair):
    for module in pair:
        module[:4].requires_grad_(requires_grad=False)
    optimizers = [torch.optim.Adam(module[4].parameters(), lr=0.1) for module in pair]
    for _ in range(3):
        for module, optimizer in zip(pair, optimizers, strict=True):
            optimizer.zero_grad()
            module(X).square().mean().backward()
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        assert mgr["model"].evict() > 0
    assert same(*pair)
    assert [p.requires_grad for p in pair[0].parameters()] == [False] * 4 + [True] * 2


def test_an_optimizer_that_is_made_while_the_model_is_out_learns(mgr, pair):
    mgr["model"].evict()
    optimizers = [torch.optim.Adam(module.parameters(), lr=0.1) for module in pair]
    for module, optimizer in zip(pair, optimizers, strict=True):
        module(X).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    mgr["model"].evict()
    assert same(*pair)


def test_the_state_of_an_optimizer_is_saved_and_restored_beside_an_evicted_model(mgr, pair):
    optimizers = [torch.optim.Adam(module.parameters(), lr=0.1) for module in pair]
    for turn in range(3):
        for index, module in enumerate(pair):
            module(X).square().mean().backward()
            optimizers[index].step()
            optimizers[index].zero_grad()
        mgr["model"].evict()
        if turn == 1:
            state = copy.deepcopy(optimizers[0].state_dict())
            optimizers[0] = torch.optim.Adam(pair[0].parameters(), lr=0.1)
            mgr["model"].load()  # the state goes where the weights are
            optimizers[0].load_state_dict(state)
    assert same(*pair)


def test_a_hook_at_the_gradient_that_steps_at_once_learns(mgr, pair):
    """Optimizers that are fused into the backward pass change a weight while the graph of others is alive."""

    @torch.no_grad()
    def step(parameter: torch.Tensor) -> None:
        parameter -= 0.1 * parameter.grad
        parameter.grad = None

    for module in pair:
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(step)
    for _ in range(3):
        for module in pair:
            module(X).square().mean().backward()
        assert same(*pair)
        mgr["model"].evict()
    assert same(*pair)


@pytest.mark.timeout(300)
def test_training_in_one_thread_while_another_makes_it_leave(mgr, pair):
    done, errors, left = threading.Event(), [], []

    def harry() -> None:
        while not done.is_set():
            try:
                left.append(mgr["model"].evict())
            except vm.ModelInUseError:
                left.append(0)
            except BaseException as error:
                errors.append(error)
                return
            done.wait(0.001)

    optimizers = [torch.optim.Adam(module.parameters(), lr=0.01) for module in pair]
    thread = threading.Thread(target=harry)
    thread.start()
    try:
        for turn in itertools.count():
            if errors or (turn >= 40 and any(left)):
                break
            for module, optimizer in zip(pair, optimizers, strict=True):
                with mgr["model"].lease():
                    module(X).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                done.wait(0.001)
    finally:
        done.set()
        thread.join()
    assert not errors
    assert any(left)
    assert same(*pair)


def test_learned_statistics_and_averages_survive(mgr):
    """An average of weights (EMA) is a model of its own, updated in place from one that leaves."""
    model = net()
    twin = copy.deepcopy(model)
    averages = [torch.optim.swa_utils.AveragedModel(module) for module in (model, twin)]
    mgr.register("model", model)
    mgr.register("average", averages[0])
    for _ in range(3):
        for module, average in zip((model, twin), averages, strict=True):
            with torch.no_grad():
                module[0].weight.add_(1)
            mgr["model"].load()
            mgr["average"].load()
            average.update_parameters(module)
        mgr["model"].evict()
        mgr["average"].evict()
    assert same(*averages)
    assert same_values(averages[0].n_averaged, averages[1].n_averaged)
