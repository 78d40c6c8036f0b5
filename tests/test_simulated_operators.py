"""Operators on the simulated GPU give what they give on the CPU, and refuse what CUDA refuses.

Without these the other tests would prove on the simulation what fails on a card: operators that quietly take tensors of
two devices, results that do not lie over their arguments' memory, in-place operators that write into a copy.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

pytestmark = pytest.mark.simulation_only


def on_device(*shape: int, **options) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", **options)


# ------------------------------------------------------------------------------------------------------------ operators


def test_views_share_memory_with_their_base():
    base = torch.zeros(4, 6, device="cuda")
    views = [
        base.view(24), base.t(), base.reshape(6, 4), base.as_strided((2, 2), (1, 1), 3), base.unfold(1, 2, 2), base[1:],
        torch.view_as_complex(base.view(4, 3, 2)), base.view(torch.int32), base.expand(2, 4, 6), base.detach(),
    ]  # fmt: skip
    assert {view.untyped_storage().data_ptr() for view in views} == {base.data_ptr()}
    assert all(view.is_cuda for view in views)
    base.fill_(1)
    assert base.as_strided((2, 2), (1, 1), 3).sum() == 4
    views[0][5] = 7
    assert base[0, 5] == 7
    alias = torch.ops.aten.alias(base)
    assert alias.data_ptr() == base.data_ptr()


def test_operators_write_in_place_and_into_out():
    x, y = torch.arange(6.0, device="cuda"), torch.ones(6, device="cuda")
    address = x.data_ptr()
    assert x.add_(y) is x
    x[2] = 40
    x[torch.tensor([0, 1])] = -1.0
    assert (x.data_ptr(), x.tolist()) == (address, [-1, -1, 40, 4, 5, 6])
    out = torch.empty(6, device="cuda")
    assert torch.mul(x, 2, out=out) is out
    assert out.tolist() == [-2, -2, 80, 8, 10, 12]
    grown = torch.empty(0, device="cuda")
    torch.add(x, y, out=grown)
    assert grown.tolist() == [0, 0, 41, 5, 6, 7]
    values, indices = torch.empty(0, device="cuda"), torch.empty(0, dtype=torch.int64, device="cuda")
    torch.sort(x, out=(values, indices))
    assert values.tolist() == sorted(x.tolist())
    with pytest.raises(RuntimeError, match="refer to a single memory location"):
        torch.add(x[1:], 1, out=x[:-1])


def test_values_come_back_to_python():
    x = torch.tensor([1.5, 2.5], device="cuda")
    assert (x[0].item(), x.tolist(), float(x.sum()), bool((x > 1).all())) == (1.5, [1.5, 2.5], 4.0, True)
    assert torch.equal(x, x.clone())
    assert not torch.equal(x, x + 1)
    assert torch.nonzero(x > 2).tolist() == [[1]]
    assert torch.tensor(3 + 4j, device="cuda").abs().item() == 5
    assert x.conj().is_cuda
    assert "cuda:0" in repr(x)
    with pytest.raises(TypeError, match="cuda"):
        x.numpy()


@pytest.mark.parametrize(
    "mix",
    [
        lambda there, here: there + here,
        lambda there, here: here + there,
        lambda there, here: there @ here,
        lambda there, here: functional.linear(here, there),
        lambda there, here: torch.cat([there, here]),
        lambda there, here: there.add_(here),
        lambda there, here: here.add_(there),
        lambda there, here: torch.where(here > 0, there, there),
        lambda there, here: functional.embedding(here.long(), there),
        lambda there, here: torch.nn.functional.conv1d(there, here[None]),
        lambda there, here: here[there.long()],
        torch.equal,
        lambda there, here: torch.mul(here, here, out=there),
        lambda there, here: there.index_select(0, here[0, 0].long()),
    ],
)
def test_tensors_of_two_devices_are_refused(mix):
    there, here = torch.ones(4, 4, device="cuda"), torch.ones(4, 4)
    with pytest.raises(RuntimeError, match="device"):
        mix(there, here)


def test_the_refusal_names_both_devices():
    with pytest.raises(RuntimeError, match="same device, but found at least two devices, cuda:0 and cpu!"):
        torch.ones(2, device="cuda") + torch.ones(2)


def test_scalars_and_indices_may_lie_on_the_cpu():
    x = torch.arange(4.0, device="cuda")
    assert (x * torch.tensor(2.0)).tolist() == [0, 2, 4, 6]
    assert x[torch.tensor([3, 1])].tolist() == [3, 1]
    assert x[torch.tensor([True, False, False, True])].tolist() == [0, 3]
    x.index_put_((torch.tensor([0]),), torch.tensor(9.0))
    one = torch.tensor(1.0)
    y = torch.zeros(3, device="cuda").fill_(one).masked_fill(torch.ones(3, device="cuda").bool(), one)
    assert y.floor_divide(one).eq_(one).index_fill(0, torch.tensor([0], device="cuda"), one).tolist() == [1, 1, 1]
    assert torch.where(y > 0, y, one, out=torch.empty(3, device="cuda")).tolist() == [1, 1, 1]
    assert torch.where(x > 2, x, torch.tensor(0.0)).tolist() == [9, 0, 0, 3]
    assert torch.ones(4)[x.new_tensor(1).long().cpu()] == 1


LAYERS = {
    "linear": (lambda: nn.Linear(8, 8), (3, 8)),
    "convolution": (lambda: nn.Conv2d(3, 4, 3, padding=1), (2, 3, 8, 8)),
    "depthwise": (lambda: nn.Conv2d(4, 4, 3, groups=4), (2, 4, 8, 8)),
    "transposed": (lambda: nn.ConvTranspose2d(3, 4, 3), (2, 3, 8, 8)),
    "dilated": (lambda: nn.Conv3d(3, 4, 2, dilation=2), (1, 3, 6, 6, 6)),
    "lstm": (lambda: nn.LSTM(8, 6, 2, bidirectional=True), (5, 3, 8)),
    "gru": (lambda: nn.GRU(8, 6, 2, bias=False), (5, 3, 8)),
    "gru with bias": (lambda: nn.GRU(8, 6), (5, 3, 8)),
    "layer norm": (lambda: nn.LayerNorm(8), (3, 8)),
    "rms norm": (lambda: nn.RMSNorm(8), (3, 8)),
    "batch norm": (lambda: nn.BatchNorm2d(3), (2, 3, 4, 4)),
    "transformer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), (2, 5, 8)),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), (3, 8)),
}


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_compute_and_learn_what_they_do_on_the_cpu(name, train):
    make, shape = LAYERS[name]
    here = make().train(train)
    there, x = copy.deepcopy(here).cuda(), torch.randn(shape)
    results = []
    for model, values in ((here, x), (there, x.cuda())):
        inputs = values.clone().requires_grad_(requires_grad=True)
        out = model(inputs)
        out = out[0] if isinstance(out, tuple) else out
        out.square().sum().backward()
        results.append([out, inputs.grad, *[p.grad for p in model.parameters()]])
    for ours, theirs in zip(*results, strict=True):
        assert theirs.is_cuda
        torch.testing.assert_close(theirs.cpu(), ours, rtol=1e-4, atol=1e-4)


def test_attention_and_half_precision_softmax_work():
    q, k, v = (on_device(1, 2, 5, 8) for _ in range(3))
    ours = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    theirs = functional.scaled_dot_product_attention(q.cpu(), k.cpu(), v.cpu(), is_causal=True)
    torch.testing.assert_close(ours.cpu(), theirs)
    x = on_device(3, 4, dtype=torch.bfloat16, requires_grad=True)
    for function in (functional.softmax, functional.log_softmax):
        out = function(x, dim=-1, dtype=torch.float32)
        assert out.dtype == torch.float32
        out.square().sum().backward()
    assert x.grad.dtype == torch.bfloat16


def test_autocast_and_inference_mode_work():
    layer, x = nn.Linear(8, 8).cuda(), on_device(2, 8)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(x).dtype == torch.float32
    with torch.inference_mode():
        out = layer(x)
        assert out.is_inference()
        assert out.view(16).unfold(0, 2, 2).is_inference()
    assert not layer.weight.is_inference()


def test_an_optimizer_steps_as_on_the_cpu():
    torch.manual_seed(0)
    here = nn.Linear(4, 4)
    there = copy.deepcopy(here).cuda()
    x = torch.randn(3, 4)
    for model, inputs in ((here, x), (there, x.cuda())):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(inputs).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(there.weight.cpu(), here.weight)


def test_compiled_modules_compute_the_same():
    torch._dynamo.reset()
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).cuda(), on_device(2, 4)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), model(x))


# ------------------------------------------------------------------------------------------------------- random numbers


def test_random_numbers_follow_the_seed_and_leave_the_cpus_alone():
    torch.manual_seed(5)
    cpu = torch.get_rng_state()
    first = torch.rand(10, device="cuda"), functional.dropout(torch.ones(100, device="cuda"), 0.5)
    assert torch.equal(torch.get_rng_state(), cpu)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(10, device="cuda"), first[0])
    assert torch.equal(functional.dropout(torch.ones(100, device="cuda"), 0.5), first[1])
    assert set(first[1].tolist()) == {0.0, 2.0}


def test_the_state_of_the_random_numbers_can_be_kept():
    state = torch.cuda.get_rng_state()
    first = torch.randn(5, device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.randn(5, device="cuda"), first)
    torch.cuda.manual_seed(1)
    assert torch.cuda.initial_seed() == 1
    generator = torch.Generator("cuda").manual_seed(3)
    again = torch.Generator("cuda").manual_seed(3)
    assert generator.device.type == "cuda"
    assert torch.equal(
        torch.randn(5, device="cuda", generator=generator), torch.randn(5, device="cuda", generator=again)
    )
    with pytest.raises(RuntimeError, match="generator"):
        torch.randn(5, device="cuda", generator=torch.Generator())
