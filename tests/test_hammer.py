"""Eight threads do everything to five models at once, at a budget that holds half of them.

Without this a rare order of events gives wrong values, a hang, or bytes that nobody gives back.
``VRAM_MAGIC_HAMMER_S`` sets how many seconds it goes on at least (4 by default): a slow machine goes on until all was
done that is to be done.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import random
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from place import DEVICE, footprint, same_values
from safetensors.torch import save_file
from torch import nn

import vram_magic as vm

SECONDS = float(os.environ.get("VRAM_MAGIC_HAMMER_S", "4"))
THREADS, MODELS, SIZE = 8, 5, 128
LAYER_BYTES = SIZE * SIZE * 4
ALL = {"call", "evict", "load", "forget", "pin", "lease", "stream"}
EXPECTED_ERRORS = (vm.VRAMError, torch.OutOfMemoryError)  # no room, in use, pinned, not there just now


@pytest.fixture
def manager_options():
    return {"block_bytes": "64KiB", "host_budget": 3 * LAYER_BYTES}  # some copies in RAM, some in spill files


class Model(nn.Module):
    """Three layers of whole numbers: sums are exact, in whatever order they are made."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList([nn.Linear(SIZE, SIZE, bias=False) for _ in range(3)])
        for layer in self.layers:
            layer.weight.data.random_(-2, 3)
        self.requires_grad_(requires_grad=False).to(DEVICE)

    def forward(self, x):
        for layer in self.layers:
            x = torch.remainder(layer(x), 7)
        return x

    def stream(self, x):
        for layer in self.layers:
            x = torch.remainder(layer(x), 7)
            yield x


class Hammer:
    """What the threads do, and what must hold."""

    def __init__(self, mgr: vm.VRAMManager, folder: Path) -> None:
        self.mgr, self.errors, self.done = mgr, [], Counter()
        self.before = mgr.used_bytes
        self.x = torch.arange(SIZE, device=DEVICE).remainder(5).float()
        self.models = [Model(seed) for seed in range(MODELS)]
        self.models[4].layers[0] = self.models[3].layers[0]  # two share a layer
        self.expected = [model(self.x).tolist() for model in self.models]
        self.sources = [folder / f"{seed}.safetensors" if seed % 2 else None for seed in range(MODELS)]
        for model, source in zip(self.models, self.sources, strict=True):
            if source is not None:
                save_file(model.state_dict(), source)
        for index in range(MODELS):
            self.register(index)
        self.end = threading.Event()

    def register(self, index: int) -> vm.Handle:
        tier = ("llm", "tts", "asr")[index % 3]
        return self.mgr.register(f"m{index}", self.models[index], tier=tier, source=self.sources[index])

    def work(self, seed: int) -> None:
        rng = random.Random(seed)
        doings = [self.call] * 6 + [
            self.evict, self.load, self.pin, self.forget, self.lease, self.stream, self.give_up, self.look, self.room,
            self.allocate, self.read,
        ]  # fmt: skip
        while not (self.end.is_set() or self.errors):
            doing, index = rng.choice(doings), rng.randrange(MODELS)
            try:
                with torch.no_grad():
                    doing(index)
                self.done[doing.__name__] += 1
            except EXPECTED_ERRORS:
                self.done[f"{doing.__name__}: refused"] += 1
            except BaseException as error:
                # Between `forget` and `register` a model on an accelerator is the user's own, and may be on the CPU.
                if DEVICE == "cpu" or "on the same device" not in str(error):
                    self.errors.append(error)

    def enough(self) -> bool:
        """Whether everything was done at least once, and much of it often."""
        done = Counter(self.done)
        return done.keys() >= ALL and sum(n for name, n in done.items() if not name.endswith("refused")) > 50

    def right(self, index: int, result: torch.Tensor) -> None:
        assert result.tolist() == self.expected[index], f"m{index} computed wrong values"

    def call(self, index):
        self.right(index, self.models[index](self.x))

    def evict(self, index):
        self.mgr[f"m{index}"].evict()

    def load(self, index):
        self.mgr[f"m{index}"].load()

    def pin(self, index):
        handle = self.mgr[f"m{index}"]
        handle.pin()
        try:
            self.right(index, self.models[index](self.x))
        finally:
            handle.unpin()

    def forget(self, index):
        try:
            self.mgr[f"m{index}"].forget()
        finally:
            self.register(index)

    def lease(self, index):
        with self.mgr[f"m{index}"].lease() as model:
            self.right(index, model(self.x))

    def stream(self, index):
        *_, last = self.models[index].stream(self.x)
        self.right(index, last)

    def give_up(self, index):
        assert next(self.models[index].stream(self.x)).shape == (SIZE,)

    def look(self, index):
        handle = self.mgr[f"m{index}"]
        assert handle.total_bytes == 3 * LAYER_BYTES
        assert 0 <= handle.device_bytes <= handle.total_bytes
        assert handle.state
        assert handle.why()

    def room(self, index):
        self.mgr.plan(LAYER_BYTES)
        with self.mgr.reserve(LAYER_BYTES):
            assert torch.ones(64, device=DEVICE).sum() == 64

    def allocate(self, index):
        assert torch.ones(SIZE, SIZE, device=DEVICE).sum() == SIZE * SIZE

    def read(self, index):
        state = self.models[index].state_dict()
        assert len(state) == 3
        assert all(abs(value) <= 2 for value in state["layers.2.weight"][5].tolist())


def run(hammer: Hammer, threads: list[threading.Thread]) -> None:
    """For so long; a hang shows all stacks and fails, and holds nobody up."""
    interval = sys.getswitchinterval()
    faulthandler.dump_traceback_later(SECONDS + 120)
    try:
        sys.setswitchinterval(1e-5)
        for thread in threads:
            thread.start()
        hammer.end.wait(SECONDS)
        deadline = time.monotonic() + 60
        while not (hammer.enough() or hammer.errors or time.monotonic() > deadline):
            hammer.end.wait(0.1)
        hammer.end.set()
        deadline = time.monotonic() + 90
        for thread in threads:
            thread.join(max(deadline - time.monotonic(), 0))
    finally:
        hammer.end.set()
        sys.setswitchinterval(interval)
        faulthandler.cancel_dump_traceback_later()
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"


# cases: evict-in-use, evict-deadlock, shared-submodule
@pytest.mark.timeout(240)
def test_everything_at_once_ends_with_true_values_and_true_books(mgr, tmp_path):
    hammer = Hammer(mgr, tmp_path)
    values = [[p.cpu().clone() for p in model.parameters()] for model in hammer.models]
    counted = sum(p.nbytes for own in values for p in own) if DEVICE == "cpu" else 0
    mgr.budget_bytes = hammer.before + counted + 7 * LAYER_BYTES + footprint(64 * 1024)  # of 14 layers
    threads = [threading.Thread(target=hammer.work, args=(seed,), daemon=True) for seed in range(THREADS)]
    run(hammer, threads)
    if hammer.errors:
        raise hammer.errors[0]
    assert hammer.enough(), hammer.done
    gc.collect()
    books_are_true(hammer)
    for model, own in zip(hammer.models, values, strict=True):
        assert all(same_values(p, right) for p, right in zip(model.parameters(), own, strict=True))
    mgr.budget_bytes = "1GiB"
    for index in range(MODELS):
        hammer.call(index)
    hammer.models.clear()
    del model, values, own
    gc.collect()
    assert not mgr.models
    assert mgr.used_bytes == hammer.before + footprint(hammer.x.nbytes)
    assert mgr._torch_models._host.used_bytes == 0
    assert not [path for path in (tmp_path / "spill").rglob("*") if path.is_file()]


def books_are_true(hammer: Hammer) -> None:
    mgr = hammer.mgr
    assert len(mgr.models) == MODELS
    for handle in mgr.models.values():
        assert not handle.in_use, handle
        assert not handle.pinned, handle
        assert not handle._managed.moving, handle
    meter = mgr._core.device.meter
    assert meter.committed_bytes == meter.live_bytes
    if DEVICE == "cuda":
        assert mgr.used_bytes == torch.cuda.memory_allocated()
    assert mgr.used_bytes <= mgr.budget_bytes


# cases: evict-deadlock
@pytest.mark.timeout(300)
def test_each_others_victims_with_room_for_one_go_on_and_on(mgr, tmp_path):
    hammer = Hammer(mgr, tmp_path)
    for index in (2, 3, 4):
        mgr[f"m{index}"].evict()
        mgr[f"m{index}"].forget()
    mgr["m0"].load()
    mgr["m1"].evict()
    mgr.budget_bytes = mgr.used_bytes + LAYER_BYTES
    turns: Counter[int] = Counter()
    refused: list[str] = []

    def alternate(first: int) -> None:
        with torch.no_grad():
            for turn in range(60):
                index = (first + turn) % 2
                try:
                    hammer.call(index)
                    turns[first] += 1
                except EXPECTED_ERRORS as error:
                    refused.append(f"{type(error).__name__}: {error}")
                except BaseException as error:
                    hammer.errors.append(error)
                    return

    threads = [threading.Thread(target=alternate, args=(first,), daemon=True) for first in (0, 1)]
    interval = sys.getswitchinterval()
    with contextlib.ExitStack() as stack:
        stack.callback(sys.setswitchinterval, interval)
        sys.setswitchinterval(1e-5)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(100)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    if hammer.errors:
        raise hammer.errors[0]
    assert not refused, "there is always room for the one whose turn it is"


def test_a_generator_keeps_its_lease_until_it_is_dropped_in_whatever_thread(mgr, tmp_path):
    hammer = Hammer(mgr, tmp_path)
    generator = [hammer.models[0].stream(hammer.x)]
    next(generator[0])
    with pytest.raises(vm.ModelInUseError):
        mgr["m0"].evict()
    with pytest.raises(vm.VRAMOutOfMemoryError):
        mgr.make_room(mgr.budget_bytes)
    assert mgr["m0"].state == "device"
    thread = threading.Thread(target=generator.clear)
    thread.start()
    thread.join()
    assert not mgr["m0"].in_use
    assert mgr["m0"].evict() == 3 * LAYER_BYTES
