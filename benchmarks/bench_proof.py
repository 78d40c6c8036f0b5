"""What the proof costs that an evicted weight is safe: an eviction beside the reload that follows it.

A model of 256 MiB that its file holds leaves the CPU device and returns, again and again. It is hashed as it leaves,
once more when nobody can reach the old memory any more (`leaving`), and as it returns. Told as ratios to the reload,
beside reading the same file with safetensors into memory of its own, in the same rounds:

* first eviction: the file is read and hashed too, since nothing of it is known yet
* later evictions: the weights are hashed, the file is not read
* an edited model: it is written to a spill file
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

import vram_magic as vm

LAYERS, WIDTH = 64, 1024
ROUNDS = int(sys.argv[1]) if len(sys.argv) > 1 else 9


def timed(act) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def copied(path: Path) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in load_file(path).values()]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, vm.VRAMManager(device="cpu", budget="4GiB", spill_dir=folder) as mgr:
        path = Path(folder) / "model.safetensors"
        model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]).requires_grad_(
            requires_grad=False
        )
        save_file(model.state_dict(), path)
        times: dict[str, list[float]] = {}
        for _ in range(ROUNDS):
            handle = mgr.register("model", model, source=path)
            note = lambda what, act: times.setdefault(what, []).append(timed(act))  # noqa: E731  short, and used here
            note("first eviction", handle.evict)
            note("reload", handle.load)
            note("later eviction", handle.evict)
            handle.load()
            note("safetensors", lambda: copied(path))
            for weight in model.parameters():
                weight.add_(1)
            note("eviction of an edited model", handle.evict)
            handle.load()
            for weight in model.parameters():
                weight.sub_(1)
            handle.forget()
            save_file(model.state_dict(), path)
        reload = statistics.median(times["reload"])
        print(f"{handle.total_bytes / 2**20:.0f} MiB, median of {ROUNDS} rounds, relative to the reload")
        for what, samples in times.items():
            print(f"{what:>28}: {statistics.median(samples) / reload:.2f}")


main()
