"""One layout of two models in device memory, and what had to leave of it for one large tensor. Prints one line.

    python tests/cuda/standin.py python tests/cuda/fragments.py built|pools|loose-pools|returned

`built`: the models' layers lie in turn; `pools`: so, but each model in a `torch.cuda.MemPool` of its own, which lives;
`loose-pools`: which was let go of after building; `returned`: after both have left and come back, as managed models do.
"""

from __future__ import annotations

import contextlib
import sys

import torch
from helpers import MIB, take
from standin import Standin
from torch import nn

import vram_magic as vm

LAYERS, LAYER_BYTES, NEED = 34, 3 * MIB, 100 * MIB


def build_in_turn(pools: list[torch.cuda.MemPool]) -> list[nn.ParameterList]:
    models = [nn.ParameterList(), nn.ParameterList()]
    for _ in range(LAYERS):
        for number, model in enumerate(models):
            with torch.cuda.use_mem_pool(pools[number]) if pools else contextlib.nullcontext():
                model.append(nn.Parameter(take(LAYER_BYTES).view(torch.float32), requires_grad=False))
    return models


def missing_mib(handles: list[vm.Handle]) -> int:
    return sum(handle.total_bytes - handle.device_bytes for handle in handles) // MIB


def main(layout: str) -> None:
    standin = Standin()
    pools = [torch.cuda.MemPool(), torch.cuda.MemPool()] if layout.endswith("pools") else []
    models = build_in_turn(pools)
    if layout == "loose-pools":
        pools.clear()
    mgr = vm.VRAMManager(device="cuda", budget="10GiB", block_bytes=2 * LAYER_BYTES)
    handles = [mgr.register(f"m{i}", model) for i, model in enumerate(models)]
    if layout == "returned":
        for handle in handles:
            handle.evict()
        torch.cuda.empty_cache()
        for handle in handles:
            handle.load()
    torch.cuda.empty_cache()
    standin.capacity_bytes = standin.used_bytes
    handles[0].evict()
    out, ooms = missing_mib(handles), standin.counts()["ooms"]
    try:
        taken = take(NEED)
        told = f"{taken.numel() // MIB} MiB fit"
    except torch.OutOfMemoryError:
        told = f"{NEED // MIB} MiB do not fit"
    more, failed = missing_mib(handles) - out, standin.counts()["ooms"] - ooms
    print(f"{told}: {out} MiB were out, {more} MiB more left, {failed} failed mallocs")


if __name__ == "__main__":
    main(sys.argv[1])
