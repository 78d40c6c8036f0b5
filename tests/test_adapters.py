"""Adapters (peft) over a managed model: added, trained, merged, unmerged and removed, resident or evicted.

Without this a merged adapter is lost at the next eviction, or the new weights land where the model does not compute.
"""

from __future__ import annotations

import copy

import pytest
import torch
from place import DEVICE, same_values
from transformers import LlamaConfig, LlamaForCausalLM

import vram_magic as vm

peft = pytest.importorskip("peft")

TOKENS = torch.arange(12, device=DEVICE).view(2, 6)


@pytest.fixture
def manager_options():
    return {"block_bytes": "16KiB", "host_budget": 0}


@pytest.fixture
def folder(tmp_path) -> str:
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96}
    config = LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=2)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    return str(tmp_path / "base")


@pytest.fixture
def pair(mgr, folder) -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
    """The managed model, backed by its folder, and a twin that we never touch."""
    twin = LlamaForCausalLM.from_pretrained(folder).eval().to(DEVICE)
    handle = mgr.load("base", folder)
    mgr.kept = handle  # it keeps the model
    return handle.model, twin


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    mine, right = one.state_dict(), other.state_dict()
    return mine.keys() == right.keys() and all(same_values(mine[name], right[name]) for name in mine)


@torch.no_grad()
def answer(model: torch.nn.Module) -> torch.Tensor:
    return model(TOKENS).logits


def lora() -> peft.LoraConfig:
    return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)


def adapted(module: torch.nn.Module) -> torch.nn.Module:
    torch.manual_seed(1)
    return peft.get_peft_model(module, lora())


def place(handle: vm.Handle, where: str) -> None:
    (handle.evict if where == "evicted" else handle.load)()


WHERE = ["resident", "evicted"]


# cases: adapter-load-flips-residency
@pytest.mark.parametrize("where", WHERE)
def test_an_adapter_is_picked_up_and_computes_on_the_device(mgr, pair, where):
    handle = mgr["base"]
    before = handle.total_bytes
    place(handle, where)
    wrapped, right = (adapted(module) for module in pair)
    assert torch.equal(answer(wrapped), answer(right))
    assert handle.state == "device"
    added = sum(p.nbytes for name, p in wrapped.named_parameters() if "lora" in name)
    assert added > 0
    assert handle.total_bytes == before + added
    handle.evict()
    assert same(wrapped, right)
    assert torch.equal(answer(wrapped), answer(right))


# cases: in-place-changes-lost
@pytest.mark.parametrize("merged", WHERE)
@pytest.mark.parametrize("unmerged", WHERE)
def test_a_merged_adapter_survives_and_can_be_unmerged(mgr, pair, merged, unmerged):
    handle = mgr["base"]
    wrapped, right = (adapted(module) for module in pair)
    place(handle, merged)
    for module in (wrapped, right):
        module.merge_adapter()
    for move in (handle.evict, handle.load, handle.evict):
        move()
        assert same(wrapped, right)
    assert torch.equal(answer(wrapped), answer(right))
    place(handle, unmerged)
    for module in (wrapped, right):
        module.unmerge_adapter()
    for move in (handle.evict, handle.load):
        move()
        assert same(wrapped, right)
    assert torch.equal(answer(wrapped), answer(right))


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("end", ["merge_and_unload", "unload"])
def test_what_is_left_of_an_adapter_is_the_plain_model(mgr, pair, end, where):
    handle = mgr["base"]
    wrapped, right = (adapted(module) for module in pair)
    place(handle, where)
    plain, plain_right = (getattr(module, end)() for module in (wrapped, right))
    assert plain is pair[0]
    handle.evict()
    assert same(plain, plain_right)
    assert torch.equal(answer(plain), answer(plain_right))


def test_two_adapters_are_switched_while_the_model_comes_and_goes(mgr, pair):
    handle = mgr["base"]
    both = [adapted(module) for module in pair]
    handle.evict()
    for module in both:
        torch.manual_seed(2)
        module.add_adapter("second", lora())
    for name in ("second", "default", "second"):
        for module in both:
            module.set_adapter(name)
        assert torch.equal(answer(both[0]), answer(both[1]))
        handle.evict()
    with both[0].disable_adapter(), both[1].disable_adapter():
        assert torch.equal(answer(both[0]), answer(both[1]))
    for module in both:
        module.delete_adapter("second")
    handle.evict()
    assert same(*both)


def test_a_trained_adapter_is_that_of_an_undisturbed_twin(mgr, pair):
    handle = mgr["base"]
    both = [adapted(module) for module in pair]
    optimizers = [torch.optim.Adam([p for p in m.parameters() if p.requires_grad], lr=0.01) for m in both]
    for _ in range(3):
        for module, optimizer in zip(both, optimizers, strict=True):
            module(TOKENS, labels=TOKENS).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert handle.evict()
        assert same(*both)


def test_only_what_was_merged_is_copied_out_of_the_file(mgr, pair):
    handle = mgr["base"]
    wrapped = adapted(pair[0])
    wrapped.merge_and_unload()
    handle.evict()
    merged = sum(p.nbytes for name, p in pair[0].named_parameters() if "q_proj" in name or "v_proj" in name)
    spilled = handle._managed.body.figures.spilled_bytes
    passing = sum(buffer.nbytes for buffer in pair[0].buffers())
    assert spilled == merged + passing


@pytest.mark.parametrize("where", WHERE)
def test_an_adapter_is_saved_and_loaded_beside_an_evicted_model(mgr, pair, tmp_path, where):
    wrapped, right = (adapted(module) for module in pair)
    place(mgr["base"], where)
    wrapped.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(copy.deepcopy(right.unload()), tmp_path / "adapter")
    assert torch.equal(answer(again), answer(wrapped))


def test_an_adapted_model_can_be_what_is_managed(mgr, pair):
    wrapped, right = (adapted(module) for module in pair)
    mgr["base"].forget()
    handle = mgr.register("adapted", wrapped)
    handle.evict()
    assert torch.equal(answer(wrapped), answer(right))
    handle.evict()
    tokens = wrapped.generate(input_ids=TOKENS, max_new_tokens=3, do_sample=False)
    assert torch.equal(tokens, right.generate(input_ids=TOKENS, max_new_tokens=3, do_sample=False))
