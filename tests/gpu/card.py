"""What the first checks share: models on the card, a manager with so much room, and a card that is full.

On the stand-in runtime (`REHEARSAL`) all is small, and kernels do nothing. Sizes are bytes.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import torch
from torch import nn

import vram_magic as vm

__all__ = [
    "GIB",
    "LAYERS",
    "LAYER_BYTES",
    "MIB",
    "REHEARSAL",
    "Skipped",
    "contents",
    "hogged",
    "in_threads",
    "inputs",
    "manager",
    "needs_kernels",
    "refused",
    "same",
    "stack",
    "take",
]

MIB, GIB = 1 << 20, 1 << 30

REHEARSAL = torch.cuda.is_available() and torch.cuda.get_device_name() == "Stand-in GPU"
SIDE = 1024 if REHEARSAL else 4096
LAYER_BYTES = SIDE * SIDE * 4  # 4 or 64 MiB
LAYERS = 8


class Skipped(Exception):  # noqa: N818  not an error
    """A check that cannot be made here; the text says why."""


def needs_kernels() -> None:
    """Skips a check on the stand-in."""
    if REHEARSAL:
        raise Skipped("needs real kernels")


def stack(layers: int = LAYERS) -> nn.Sequential:
    """A model on the card, of random weights."""
    model = nn.Sequential(*[nn.Linear(SIDE, SIDE, bias=False, device="meta") for _ in range(layers)])
    for layer in model:
        values = torch.randn(SIDE, SIDE, device="cpu" if REHEARSAL else "cuda") / SIDE**0.5
        layer.weight = nn.Parameter(values.cuda(), requires_grad=False)
    return model.eval()


def inputs() -> torch.Tensor:
    return torch.randn(4, SIDE).cuda()


def take(size_bytes: int) -> torch.Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8, device="cuda")


def contents(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().cpu().clone() for parameter in model.parameters()]


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.equal(first.cpu(), second.cpu())


@contextlib.contextmanager
def manager(free_bytes: int | None = None, **options: object) -> Iterator[vm.VRAMManager]:
    """A manager whose budget has so many bytes free (None: all that the card has)."""
    budget = "1TiB" if free_bytes is None else torch.cuda.memory_allocated() + free_bytes
    mgr = vm.VRAMManager(device="cuda", budget=budget, **({"block_bytes": LAYER_BYTES} | options))
    try:
        yield mgr
    finally:
        mgr.close()


@contextlib.contextmanager
def hogged(left_bytes: int) -> Iterator[None]:
    """All of the card is taken, but for so many bytes."""
    torch.cuda.empty_cache()
    # torch takes 20 MiB of the driver at a time for large tensors, and 2 for small ones.
    hog = [take(max(torch.cuda.mem_get_info()[0] - left_bytes, 1) // (20 * MIB) * (20 * MIB))]
    while torch.cuda.mem_get_info()[0] >= max(left_bytes, MIB) + 2 * MIB:  # the last granule is not always to be had
        hog.append(take(MIB))
    try:
        yield
    finally:
        hog.clear()
        torch.cuda.empty_cache()


def refused(request: Callable[[], object]) -> str:
    """The message with which a request for memory was refused; it must be."""
    try:
        request()
    except torch.OutOfMemoryError as error:
        return str(error)
    raise AssertionError("more was given than there is room for")


def in_threads(work: Callable[[], None], count: int = 6) -> None:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
