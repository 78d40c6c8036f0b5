"""How long a plan takes over 10,000 models of 100 blocks each.

Printed beside a plain sort and sum over the same sizes in the same run: the ratio holds on any machine,
the milliseconds do not. The request needs nearly everything, so every model is reached and the last is cut.
"""

from __future__ import annotations

import random
import time
from statistics import median
from typing import TYPE_CHECKING

from vram_magic.policy import ModelState, Request, Snapshot, plan

if TYPE_CHECKING:
    from collections.abc import Callable

MODELS, BLOCKS, ROUNDS = 10_000, 100, 5


def snapshot() -> Snapshot:
    """Models of four ranks, a tenth of which ask to stay on the device."""
    rng = random.Random(0)

    def model(n: int) -> ModelState:
        blocks = tuple(rng.randrange(1, 2**26) for _ in range(BLOCKS))
        residency = "device" if n % 10 == 0 else "auto"
        own = {"demotable": blocks} if residency == "device" else {"blocks": blocks}
        return ModelState(f"model {n}", rng.randrange(4), rng.randrange(2**40), residency=residency, **own)

    return Snapshot(2**62, 0, tuple(model(n) for n in range(MODELS)))


def median_ms(work: Callable[[], object]) -> float:
    """The median of a few runs, in milliseconds."""
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        work()
        times.append((time.perf_counter() - start) * 1e3)
    return median(times)


def main() -> None:
    """Prints both times and their ratio."""
    device = snapshot()
    total = sum(sum(model.blocks) for model in device.models)
    request = Request(total - 2**26, rank=1)
    assert plan(device, request).satisfied

    def plain() -> int:
        return sum(sum(m.blocks) for m in sorted(device.models, key=lambda m: (m.rank, m.last_used)))

    ours, floor = median_ms(lambda: plan(device, request)), median_ms(plain)
    print(f"plan over {MODELS} models x {BLOCKS} blocks: {ours:.1f} ms")
    print(f"plain sort and sum: {floor:.1f} ms; ratio {ours / floor:.2f}")


if __name__ == "__main__":
    main()
