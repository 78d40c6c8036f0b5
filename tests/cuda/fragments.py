"""One layout of two models in device memory, and what had to leave of it for one large tensor. Prints one line.

    python tests/cuda/standin.py python tests/cuda/fragments.py built|returned

`built`: the models' layers lie in turn; `returned`: after both have left and come back, as managed models do.
"""

from __future__ import annotations

import sys

import torch
from helpers import MIB, take
from standin import Standin
from torch import nn

import vram_magic as vm

LAYERS, LAYER_BYTES, NEED = 12, 3 * MIB, 30 * MIB


def build_in_turn() -> tuple[nn.ParameterList, nn.ParameterList]:
    models = nn.ParameterList(), nn.ParameterList()
    for _ in range(LAYERS):
        for model in models:
            model.append(nn.Parameter(take(LAYER_BYTES).view(torch.float32), requires_grad=False))
    return models


def main(layout: str) -> None:
    standin = Standin()
    models = build_in_turn()
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
    freed = sum(handle.total_bytes - handle.device_bytes for handle in handles)
    ooms = standin.counts()["ooms"]
    taken = take(NEED)
    left = sum(handle.total_bytes - handle.device_bytes for handle in handles)
    tries = standin.counts()["ooms"] - ooms
    print(
        f"fits: {taken.numel() // MIB} MiB; {freed // MIB} MiB were free already, {(left - freed) // MIB} MiB more left, "
        f"{tries} failed mallocs"
    )


if __name__ == "__main__":
    main(sys.argv[1])
