"""Who keeps an edit, who keeps ties, who saves true values: offloading tools side by side on a simulated GPU.

Each tool manages the same tiny Llama with tied embeddings. It runs once, is edited, goes out as that tool lets it go
out, and runs again. Its logits must equal, bit for bit, those of a plain model on the device that got the same edit.
`kept`: they do. `LOST`: they equal those without the edit, and nobody was told. `WRONG`: neither. An error is named.

An edit is made *in a call*, by a hook, when the weight is on the device whatever the tool; *between calls*, where the
tool leaves the weight then; or *out*, after it was sent out. Tools without a way to send a model out leave that to
every call's end.

The GPU is that of tests/simulated, which is compiled at first use; without a compiler there is no table. A tool that is
not installed is told as such.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import shutil
import sys
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path[:0] = [str(Path(__file__).parents[1] / "tests")]
import simulated  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SPREAD = 0.05  # larger weights than Llama's own start with, so that each edit shows in the logits
PROMPT = [[1, 5, 9, 3]]


def tiny_llama(seed: int = 0) -> Any:
    """The model, on the CPU, in a folder's shape: `lm_head` is tied to the embedding."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        vocab_size=128,
        tie_word_embeddings=True,
        initializer_range=SPREAD,
    )
    return LlamaForCausalLM(config).eval()


def logits(model: Any) -> Any:
    """What the model computes, as a copy on the CPU."""
    import torch

    with torch.no_grad():
        return model(input_ids=torch.tensor(PROMPT, device="cuda"), use_cache=False).logits.cpu().clone()


def edited_layer(model: Any) -> Any:
    return model.model.layers[1].mlp.down_proj


# ------------------------------------------------------------------------------------------------------------ the tools


@dataclass
class Arm:
    """A model under one tool."""

    model: Any
    send_out: Callable[[], object] = lambda: None


@contextlib.contextmanager
def accelerate_cpu(_: Path) -> Iterator[Arm]:
    from accelerate import cpu_offload

    yield Arm(cpu_offload(tiny_llama(), execution_device="cuda:0"))


@contextlib.contextmanager
def accelerate_disk(folder: Path) -> Iterator[Arm]:
    from accelerate import disk_offload

    yield Arm(disk_offload(tiny_llama(), str(folder / "offloaded"), execution_device="cuda:0"))


def group_offloading(**options: Any) -> Arm:
    import torch
    from diffusers.hooks import apply_group_offloading

    model = tiny_llama()
    onload, offload = torch.device("cuda:0"), torch.device("cpu")
    apply_group_offloading(model, onload, offload, offload_type="leaf_level", **options)
    return Arm(model)


@contextlib.contextmanager
def diffusers_cpu(_: Path) -> Iterator[Arm]:
    yield group_offloading()


@contextlib.contextmanager
def diffusers_disk(folder: Path) -> Iterator[Arm]:
    yield group_offloading(offload_to_disk_path=str(folder / "offloaded"))


def managed(folder: Path, residency: str) -> Iterator[Arm]:
    import vram_magic as vm

    tiny_llama().save_pretrained(folder / "model")
    with vm.VRAMManager(device="cuda", budget="1GiB", block_bytes="64KiB", spill_dir=folder / "spill") as mgr:
        model = tiny_llama().to("cuda")
        handle = mgr.register("llm", model, residency=residency, source=folder / "model")

        def send_out() -> None:
            handle.evict()
            if handle.device_bytes:
                raise RuntimeError(f"still on the device: {handle.why()}")

        yield Arm(model, send_out)


@contextlib.contextmanager
def managed_host(folder: Path) -> Iterator[Arm]:
    yield from managed(folder, "host")


@contextlib.contextmanager
def managed_disk(folder: Path) -> Iterator[Arm]:
    yield from managed(folder, "disk")


Tool = "Callable[[Path], contextlib.AbstractContextManager[Arm]]"

TOOLS: dict[str, tuple[str, Any]] = {
    "accelerate cpu": ("accelerate", accelerate_cpu),
    "accelerate disk": ("accelerate", accelerate_disk),
    "diffusers cpu": ("diffusers", diffusers_cpu),
    "diffusers disk": ("diffusers", diffusers_disk),
    "vram_magic host": ("vram_magic", managed_host),
    "vram_magic disk": ("vram_magic", managed_disk),
}
"""Column -> the package that it needs, and what puts a model under it."""

# ------------------------------------------------------------------------------------------------------------ the edits


def add(layer: Any) -> None:
    layer.weight.add_(0.25)


def data_copy(layer: Any) -> None:
    import torch

    other = torch.linspace(-1, 1, layer.weight.numel()).view(layer.weight.shape)
    layer.weight.data.copy_(other)


def negate(layer: Any) -> None:
    layer.weight.data.neg_()


EDITS = {"add_": add, ".data.copy_": data_copy, ".data.neg_": negate}


def make(edit: Callable[[Any], None], model: Any) -> None:
    import torch

    with torch.no_grad():
        edit(edited_layer(model))


def make_in_a_call(edit: Callable[[Any], None], model: Any) -> None:
    """By a hook of the user's, behind those of the tool: the weight is on the device then."""
    import torch

    def hook(layer: Any, *_: Any) -> None:
        with torch.no_grad():
            edit(layer)

    # Inside the computation, at the activation beside the layer: a pre-hook of the layer itself would run before the
    # tool has brought it.
    layer = edited_layer(model)
    forward = layer.forward
    plain = type(layer).forward

    def once(x: Any) -> Any:
        hook(layer)
        return plain(layer, x)

    raise NotImplementedError((forward, once))
