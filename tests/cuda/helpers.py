"""What the tests on the stand-in and their scripts share: models in device memory, and their bytes.

Sizes are bytes. A layer is 1 MiB, and one block where the tests open their managers.
"""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["MIB", "contents", "stack", "take", "warm_up"]

MIB = 1 << 20


def warm_up() -> None:
    """Lets cuBLAS take its workspace, 8 MiB that stay, so that what comes after is counted from there."""
    stack(1)(torch.randn(1, 512).cuda())


def stack(layers: int) -> nn.Sequential:
    """A model of so many MiB; its products are computed on the stand-in too."""
    return nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(layers)]).cuda().requires_grad_(False)


def contents(model: nn.Module) -> list[torch.Tensor]:
    """Copies of its parameters in host memory."""
    return [parameter.detach().cpu().clone() for parameter in model.parameters()]


def take(size_bytes: int) -> torch.Tensor:
    """A tensor of so many bytes on the device."""
    return torch.empty(size_bytes, dtype=torch.uint8, device="cuda")
