"""What management costs while memory suffices: op-bound generation of a tiny Llama, with and without.

Three arms, interleaved in one process, so that the machine's moods hit all alike: the plain model without the guard;
the plain model with the guard in; the managed model with the guard in. Prints ratios to the first. The goal is at most
1.03 for the last.
"""

from __future__ import annotations

import random
import statistics
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import vram_magic as vm

ROUNDS, TOKENS = 150, 24


def tiny_llama() -> LlamaForCausalLM:
    """A model so small that Python and dispatch are all the cost."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, vocab_size=256
    )
    return LlamaForCausalLM(config).eval()


def seconds(model: LlamaForCausalLM) -> float:
    """One generation."""
    prompt = torch.tensor([[1, 2, 3]])
    start = time.perf_counter()
    model.generate(prompt, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False, pad_token_id=0)
    return time.perf_counter() - start


def take_out_or_put_in(guard, *, out):
    """Only the allocator is changed; the budget and who answers stay."""
    if out:
        guard._library.vm_uninstall(0, 0)  # noqa: SLF001
    else:
        guard._library.vm_install(0, 0, 0)  # noqa: SLF001


def main() -> None:
    """Runs the three arms."""
    torch.set_num_threads(1)
    plain, managed = tiny_llama(), tiny_llama()
    mgr = vm.VRAMManager(device="cpu", budget="8GiB")
    mgr.register("llm", managed)
    guard = mgr._guard  # noqa: SLF001  only the guard is taken out and put back
    times: dict[str, list[float]] = {"without": [], "guard only": [], "managed": []}
    for model in (plain, managed):
        seconds(model)
    arms = [("without", plain), ("guard only", plain), ("managed", managed)]
    for _ in range(ROUNDS):
        random.shuffle(arms)
        for arm, model in arms:
            take_out_or_put_in(guard, out=arm == "without")
            times[arm].append(seconds(model))
    take_out_or_put_in(guard, out=False)
    for name, pick in (("median", statistics.median), ("fastest", min)):
        base = pick(times["without"])
        for arm, taken in times.items():
            print(f"{name:>8} {arm:>10}: {pick(taken) / TOKENS * 1e3:.3f} ms a token, ratio {pick(taken) / base:.3f}")
    mgr.close()


if __name__ == "__main__":
    main()
