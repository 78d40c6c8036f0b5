"""Whatever allocates, wherever it runs and whatever mode is on: idle models leave, and the result is the same bits.

An eviction in the middle of somebody's operation must not compute under his modes, leave marks on the weights
(inference tensors cannot be trained), or draw from the random streams.
"""

import copy
import threading

import pytest
import torch
from place import DEVICE
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

MIB = 1 << 20
SLACK = 1 * MIB  # what an operation may need besides its result


class Seeing(TorchDispatchMode):
    """A mode of the user's."""

    def __init__(self):
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def idle(mgr):
    """An idle model of 16 MiB, a twin that is never moved, and the handle."""
    model = nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(16)]).to(DEVICE)
    twin = copy.deepcopy(model)
    return mgr.register("idle", model), model, twin


def under_pressure(mgr, idle, operation, *, slack=SLACK):
    """The operation's result with next to no room free; the idle model must have left for it."""
    handle = idle[0]
    before = handle.device_bytes
    mgr.budget_bytes = mgr.used_bytes + slack
    try:
        result = operation()
    finally:
        mgr.budget_bytes = "1GiB"
    assert handle.device_bytes < before, mgr.journal
    return result


def still_the_same(idle):
    """The model computes the same bits as its twin, and learns the same."""
    _, model, twin = idle
    x = torch.randn(4, 512, device=DEVICE)
    assert torch.equal(model(x), twin(x))
    for net in (model, twin):
        loss = net(x).square().sum()
        loss.backward()
        torch.optim.SGD(net.parameters(), lr=0.1).step()
        net.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def big(rows=1024):
    return torch.randn(rows, 1024, device=DEVICE)


def in_a_cell():
    x = big()
    return lambda: x + 1


def in_a_thread():
    x, found = big(), []

    def operation():
        thread = threading.Thread(target=lambda: found.append(x * 2))
        thread.start()
        thread.join()
        return found[-1]

    return operation


def in_a_backward():
    x = big().requires_grad_()

    def operation():
        x.grad = None
        (x * x).sum().backward()
        return x.grad

    return operation


def in_a_convolution():
    x, weight = torch.randn(1, 16, 256, 256, device=DEVICE), torch.randn(16, 16, 3, 3, device=DEVICE)
    return lambda: torch.nn.functional.conv2d(x, weight, padding=1)


def in_a_workspace():
    x = torch.randn(768, 768, device=DEVICE) + 768 * torch.eye(768, device=DEVICE)
    return lambda: torch.linalg.inv(x)


def in_a_resize():
    older = [torch.zeros(4, device=DEVICE), torch.zeros(4, device=DEVICE)]  # one for each run
    return lambda: older.pop().resize_(MIB).zero_()


def in_compiled_code():
    x = big()
    backend = "inductor" if DEVICE == "cpu" else "eager"  # the simulated device has no code generator
    compiled = torch.compile(lambda t: (t + 1).relu() * 2, backend=backend)
    compiled(x)
    return lambda: compiled(x)


@pytest.mark.parametrize(
    "way",
    [in_a_cell, in_a_thread, in_a_backward, in_a_convolution, in_a_workspace, in_a_resize, in_compiled_code],
    ids=lambda way: way.__name__,
)
def test_a_tensor_made_in_any_way_makes_room_and_is_right(mgr, idle, way):
    operation = way()
    expected = operation().clone()
    result = under_pressure(mgr, idle, operation)
    assert torch.equal(result, expected)
    still_the_same(idle)


def inference_mode():
    return torch.inference_mode()


def autocast():
    return torch.autocast(DEVICE, dtype=torch.bfloat16)


def no_grad():
    return torch.no_grad()


def dispatch_mode():
    return Seeing()


@pytest.mark.parametrize("mode", [inference_mode, autocast, no_grad, dispatch_mode], ids=lambda mode: mode.__name__)
def test_under_any_mode_an_eviction_in_mid_operation_leaves_the_same_bits(mgr, idle, mode):
    x, w = big(), torch.randn(1024, 1024, device=DEVICE)

    def operation():
        with mode():
            return (x @ w).relu()

    expected = operation()
    assert torch.equal(under_pressure(mgr, idle, operation), expected)
    still_the_same(idle)


def test_under_vmap_an_eviction_leaves_the_same_bits(mgr, idle):
    x, w = torch.randn(64, 64, 256, device=DEVICE), torch.randn(256, 256, device=DEVICE)

    def operation():
        return torch.vmap(lambda rows: (rows @ w).tanh())(x)

    expected = operation()
    assert torch.equal(under_pressure(mgr, idle, operation), expected)
    still_the_same(idle)


def test_a_dispatch_mode_of_the_users_sees_none_of_our_moves(mgr, idle):
    x = big()
    with Seeing() as alone:
        x + 1
    mode = Seeing()

    def operation():
        with mode:
            return x + 1

    under_pressure(mgr, idle, operation)
    assert mode.seen == alone.seen
    with Seeing() as mode:
        idle[0].load()
        idle[0].evict()
    assert mode.seen == 0


def test_a_fake_tensor_mode_of_the_users_gets_no_fake_weights(mgr, idle):
    handle, model, _ = idle

    def operation():
        with FakeTensorMode():
            return mgr.make_room("4MiB")

    assert under_pressure(mgr, idle, operation) >= 3 * MIB
    with FakeTensorMode():
        handle.load()
        handle.evict()
        handle.load()
    assert all(type(p) is nn.Parameter for p in model.parameters())
    still_the_same(idle)


def test_the_random_streams_go_on_as_if_nothing_had_left(mgr, idle):
    def drawn(slack):
        torch.manual_seed(7)
        x = under_pressure(mgr, idle, lambda: torch.randn(4 * MIB // 4, device=DEVICE), slack=slack)
        return x, torch.rand(4, device=DEVICE), torch.rand(4)

    torch.manual_seed(7)
    expected = torch.randn(4 * MIB // 4, device=DEVICE), torch.rand(4, device=DEVICE), torch.rand(4)
    assert all(torch.equal(a, b) for a, b in zip(drawn(SLACK), expected, strict=True))


def test_a_load_under_inference_mode_leaves_weights_that_can_be_trained(mgr, idle):
    handle, model, _ = idle
    handle.evict()
    with torch.inference_mode():
        model(torch.randn(1, 512, device=DEVICE))
    assert not any(p.is_inference() for p in model.parameters())
    still_the_same(idle)
