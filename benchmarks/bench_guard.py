"""What the guard costs while memory suffices: allocations of torch's CUDA allocator and their frees, with and without.

Needs torch's CUDA build. Runs on the card where there is one, else on the stand-in CUDA runtime of the tests: the
allocator's own work is the same there. The arms take turns in one process, so that the machine's moods hit all alike.
Prints nanoseconds and the ratio to the bare allocator. From C++ (`allocate`) all is the allocator's; `torch.empty` is
what a cell sees.

    .venv-cuda/bin/python benchmarks/bench_guard.py
"""

from __future__ import annotations

import os
import random
import runpy
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

ROUNDS, REPEATS = 60, 4000
SIZES = {"512 B": 512, "64 KiB": 64 << 10, "4 MiB": 4 << 20}

_ROOT = Path(__file__).resolve().parents[1]


def start_on_stand_in() -> None:
    """Becomes this script on the stand-in runtime."""
    standin = runpy.run_path(str(_ROOT / "tests/cuda/standin.py"))
    if standin["is_preloaded"]():
        raise SystemExit("torch finds no CUDA device, not even the stand-in.")
    os.execve(sys.executable, [sys.executable, *sys.argv], standin["environment"]())


def arms_of(guard) -> dict[str, Callable[[int], float]]:
    """By name: seconds for `REPEATS` allocations of so many bytes and their frees."""
    library, kind = guard._library, guard._type  # noqa: SLF001  the benchmark's own entry into the allocator

    def allocate(size_bytes: int) -> float:
        return library.vm_bench(kind, size_bytes, REPEATS) / 1e9

    def empty(size_bytes: int) -> float:
        start = time.perf_counter()
        for _ in range(REPEATS):
            torch.empty(size_bytes, dtype=torch.uint8, device="cuda")
        return time.perf_counter() - start

    return {"allocate": allocate, "torch.empty": empty}


def measure() -> None:
    """Interleaved rounds; the guard is put in by opening a manager, and taken out by closing it."""
    import vram_magic as vm

    times: dict[tuple[str, str, bool], list[float]] = {}
    guard, way, cases = None, "", [False, True]
    for number in range(ROUNDS + 1):
        random.shuffle(cases)
        for guarded in cases if number else [True]:
            mgr = vm.VRAMManager(device="cuda", budget="1TiB") if guarded else None
            if mgr is not None:
                guard, way = mgr._guard, mgr.guard  # noqa: SLF001
            for name, arm in arms_of(guard).items():
                for size, size_bytes in SIZES.items():
                    seconds = arm(size_bytes)
                    if number:  # the first round fills caches
                        times.setdefault((name, size, guarded), []).append(seconds)
            if mgr is not None:
                mgr.close()
    report(times, way)


def report(times: dict[tuple[str, str, bool], list[float]], way: str) -> None:
    """One line for each arm and size."""
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, guard: {way}")
    print(f"{'':12} {'':>7} {'bare ns':>9} {'guard ns':>9} {'ratio':>7} {'of fastest':>11}")
    for name, size in sorted({key[:2] for key in times}):
        bare, guarded = times[name, size, False], times[name, size, True]
        medians = [statistics.median(taken) / REPEATS * 1e9 for taken in (bare, guarded)]
        fastest = min(guarded) / min(bare)
        print(f"{name:12} {size:>7} {medians[0]:9.0f} {medians[1]:9.0f} {medians[1] / medians[0]:7.3f} {fastest:11.3f}")


def main() -> None:
    if torch.version.cuda is None:
        print(f"No CUDA build of torch here (this is {torch.__version__}): nothing is measured.")
        print("Make one with: make venv-cuda   then: .venv-cuda/bin/python benchmarks/bench_guard.py")
        return
    if not torch.cuda.is_available():
        start_on_stand_in()
    measure()


if __name__ == "__main__":
    main()
