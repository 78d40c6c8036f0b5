"""A hundred thousand evictions under six threads, and what they gave; `make test-cuda` runs a hundredth of it.

Each thread allocates more than is free, so that idle models leave inside its allocation, then loads a model of its own
again. Prints one line; fails when a weight changed or the ledger is not torch's, and, with the stacks of all threads,
when nothing moved for a minute.

    python tests/cuda/standin.py python tests/cuda/many_evictions.py [EVICTIONS] [THREADS]
"""

from __future__ import annotations

import faulthandler
import sys
import threading
import time
from dataclasses import dataclass

import torch
from helpers import contents, take, warm_up
from torch import nn

import vram_magic as vm

SIDE = 32
LAYER_BYTES, LAYERS, MODELS_PER_THREAD = SIDE * SIDE * 4, 24, 2
PATIENCE = 60


@dataclass
class Tally:
    """What one thread did."""

    evictions: int = 0
    """Blocks that had left one of its models before it loaded it again."""
    allocations: int = 0
    refused: int = 0


class Run:
    """Models, a manager under which they just fit, and the work of one thread."""

    def __init__(self, goal: int, threads: int) -> None:
        self.goal = goal
        self.models = [
            nn.Sequential(*[nn.Linear(SIDE, SIDE, bias=False) for _ in range(LAYERS)]).cuda()
            for _ in range(threads * MODELS_PER_THREAD)
        ]
        self.before = [contents(model) for model in self.models]
        self.manager = vm.VRAMManager(device="cuda", budget=torch.cuda.memory_allocated(), block_bytes=LAYER_BYTES)
        self.handles = [self.manager.register(f"m{i}", model) for i, model in enumerate(self.models)]
        self.need_bytes = len(self.models) * LAYERS * LAYER_BYTES // 3
        self.tallies = [Tally() for _ in range(threads)]

    def work(self, number: int) -> None:
        """Allocates and loads until all threads together have seen so many evictions."""
        tally, turn = self.tallies[number], 0
        while sum(each.evictions for each in self.tallies) < self.goal:
            faulthandler.dump_traceback_later(PATIENCE, exit=True)  # any thread's progress is progress
            self._try(tally, lambda: take(self.need_bytes))
            mine = number * MODELS_PER_THREAD + turn % MODELS_PER_THREAD
            out = sum(not parameter.is_cuda for parameter in self.models[mine].parameters())
            if self._try(tally, self.handles[mine].load):
                tally.evictions += out
            turn += 1

    def _try(self, tally: Tally, step) -> bool:
        try:
            step()
        except torch.OutOfMemoryError:
            tally.refused += 1
            return False
        tally.allocations += 1
        return True

    def check(self) -> None:
        """Every weight is as it was, and the ledger is torch's."""
        assert self.manager.used_bytes == torch.cuda.memory_allocated()
        for model, values in zip(self.models, self.before, strict=True):
            assert all(map(torch.equal, contents(model), values))
        self.manager.close()


def main(goal: int = 100_000, threads: int = 6) -> None:
    warm_up()
    run = Run(goal, threads)
    start = time.perf_counter()
    workers = [threading.Thread(target=run.work, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    took = time.perf_counter() - start
    faulthandler.cancel_dump_traceback_later()
    run.check()
    evictions, met, refused = (
        sum(getattr(t, name) for t in run.tallies) for name in ("evictions", "allocations", "refused")
    )
    print(f"{evictions} evictions in {threads} threads, {took:.0f} s; requests met: {met}, refused: {refused}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
