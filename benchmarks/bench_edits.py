"""Who keeps an edit, who keeps ties, who saves true values: offloading tools side by side on a simulated GPU.

Each tool manages the same tiny Llama. The model runs, is edited, goes out as that tool lets it go out, and runs again.
Its logits are compared, bit for bit, with those of a plain model on the device that got the same edit: `kept`, they are
equal; `LOST`, they equal those without the edit, and nobody was told; `WRONG`, neither. An error is named. A model
whose head is tied to its embedding is asked about apart, so that a lost tie does not pass for a lost edit.

An edit is made *in a call*, by the layer's own forward, when its weight is on the device under every tool; *between
calls*, where the tool leaves the weight then; or *out*, after the model was sent out. The offloaders send a model out
at the end of each call, so the last two are one there.

The GPU is that of tests/simulated, compiled at first use; without a compiler there is no table. A tool that is not
installed is told as such.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import simulated

try:
    simulated.load()  # before torch is imported
except simulated.SimulationUnavailable as reason:
    print(f"no simulated GPU, so nothing can be compared: {reason}")
    sys.exit()

import torch
import transformers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import vram_magic as vm

PROMPT = [[1, 5, 9, 3]]
KEPT, LOST, WRONG = "kept", "LOST", "WRONG"


class SelfEditing(nn.Linear):
    """A layer that can change its own weight while it runs, as spectral norm or a moving average does."""

    edit: Callable[[nn.Parameter], object] | None = None

    def forward(self, x):
        if self.edit is not None:
            self.edit(self.weight)
            self.edit = None
        return super().forward(x)


def tiny_llama(*, tied: bool) -> LlamaForCausalLM:
    """The same model every time, on the CPU. With ``tied``, its head is its embedding."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        vocab_size=128,
        tie_word_embeddings=tied,
        initializer_range=0.05,  # large enough that each edit shows in the logits
    )
    model = LlamaForCausalLM(config).eval()
    layer = SelfEditing(128, 64, bias=False)
    layer.load_state_dict(model.model.layers[1].mlp.down_proj.state_dict())
    model.model.layers[1].mlp.down_proj = layer
    return model


def layer_of(model: LlamaForCausalLM) -> SelfEditing:
    return model.model.layers[1].mlp.down_proj


@torch.no_grad()
def logits(model: LlamaForCausalLM) -> torch.Tensor:
    """What the model computes, copied to the CPU."""
    return model(input_ids=torch.tensor(PROMPT, device="cuda"), use_cache=False).logits.cpu().clone()


# ------------------------------------------------------------------------------------------------------------ the tools


@dataclass
class Arm:
    """A model under one tool."""

    model: LlamaForCausalLM
    send_out: Callable[[], object] = lambda: None


def accelerate_cpu(_: Path, model: LlamaForCausalLM) -> Iterator[Arm]:
    from accelerate import cpu_offload

    yield Arm(cpu_offload(model, execution_device="cuda:0"))


def accelerate_disk(folder: Path, model: LlamaForCausalLM) -> Iterator[Arm]:
    from accelerate import disk_offload

    yield Arm(disk_offload(model, str(folder / "offloaded"), execution_device="cuda:0"))


def group_offloading(model: LlamaForCausalLM, **options: Any) -> Arm:
    from diffusers.hooks import apply_group_offloading

    onload, offload = torch.device("cuda:0"), torch.device("cpu")
    apply_group_offloading(model, onload, offload, offload_type="leaf_level", **options)
    return Arm(model)


def diffusers_cpu(_: Path, model: LlamaForCausalLM) -> Iterator[Arm]:
    yield group_offloading(model)


def diffusers_disk(folder: Path, model: LlamaForCausalLM) -> Iterator[Arm]:
    yield group_offloading(model, offload_to_disk_path=str(folder / "offloaded"))


def managed(folder: Path, model: LlamaForCausalLM, residency: str) -> Iterator[Arm]:
    model.save_pretrained(folder / "model")
    with vm.VRAMManager(device="cuda", budget="1GiB", block_bytes="64KiB", spill_dir=folder / "spill") as mgr:
        handle = mgr.register("llm", model.to("cuda"), residency=residency, source=folder / "model")

        def send_out() -> None:
            handle.evict()
            if handle.device_bytes:
                raise RuntimeError(handle.why())

        yield Arm(model, send_out)


def vram_magic_host(folder: Path, model: LlamaForCausalLM) -> Iterator[Arm]:
    yield from managed(folder, model, "host")


def vram_magic_disk(folder: Path, model: LlamaForCausalLM) -> Iterator[Arm]:
    yield from managed(folder, model, "disk")


Tool = Callable[[Path, LlamaForCausalLM], Iterator[Arm]]
Edit = Callable[[nn.Parameter], None]

TOOLS: list[Tool] = [accelerate_cpu, accelerate_disk, diffusers_cpu, diffusers_disk, vram_magic_host, vram_magic_disk]


@contextlib.contextmanager
def under(tool: Tool, *, tied: bool) -> Iterator[Arm]:
    """A fresh model under the tool, which has run once."""
    put = contextlib.contextmanager(tool)
    with tempfile.TemporaryDirectory() as folder, put(Path(folder), tiny_llama(tied=tied)) as arm:
        logits(arm.model)
        yield arm


# ------------------------------------------------------------------------------------------------------------ the edits


def add(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight.add_(0.25)


def data_copy(weight: nn.Parameter) -> None:
    weight.data.copy_(torch.linspace(-1, 1, weight.numel()).view(weight.shape))


def negate(weight: nn.Parameter) -> None:
    weight.data.neg_()


def in_a_call(arm: Arm, edit: Edit) -> None:
    layer_of(arm.model).edit = edit
    logits(arm.model)
    arm.send_out()


def between_calls(arm: Arm, edit: Edit) -> None:
    edit(layer_of(arm.model).weight)
    arm.send_out()


def while_out(arm: Arm, edit: Edit) -> None:
    arm.send_out()
    edit(layer_of(arm.model).weight)


EDITS = {"add_": add, ".data.copy_": data_copy, ".data.neg_": negate}
MOMENTS = {"in a call": in_a_call, "between calls": between_calls, "while out": while_out}


def verdict(found: torch.Tensor, wanted: torch.Tensor, without: torch.Tensor) -> str:
    if torch.equal(found, wanted):
        return KEPT
    return LOST if torch.equal(found, without) else WRONG


def keeps_edit(arm: Arm, edit: Edit, moment: Callable[..., None]) -> str:
    """Whether the second run sees the edit."""
    plain = tiny_llama(tied=False).to("cuda")
    without = logits(plain)
    edit(layer_of(plain).weight)
    wanted = logits(plain)
    assert not torch.equal(wanted, without), "an edit that does not show proves nothing"
    moment(arm, edit)
    return verdict(logits(arm.model), wanted, without)


# ------------------------------------------------------------------------------------------------ ties, and saved files


def same_logits(arm: Arm, *, tied: bool) -> str:
    """Whether the model computes what it computes without any tool."""
    arm.send_out()
    return "same" if torch.equal(logits(arm.model), logits(tiny_llama(tied=tied).to("cuda"))) else WRONG


def same_parameter(arm: Arm) -> str:
    """Whether head and embedding are one parameter while out, and after the next call."""
    arm.send_out()
    tied = [arm.model.lm_head.weight is arm.model.model.embed_tokens.weight]
    logits(arm.model)
    tied += [arm.model.lm_head.weight is arm.model.model.embed_tokens.weight]
    return KEPT if all(tied) else LOST


def edit_reaches_both(arm: Arm) -> str:
    """Whether an edit of the embedding between calls changes the head too, as it does without any tool."""
    plain = tiny_llama(tied=True).to("cuda")
    without = logits(plain)
    for model in (plain, arm.model):
        add(model.model.embed_tokens.weight)
    arm.send_out()
    return verdict(logits(arm.model), logits(plain), without)


def true_values(saved: dict[str, torch.Tensor]) -> str:
    """Whether every saved tensor is, bit for bit, that of the model."""
    wanted = tiny_llama(tied=False).state_dict()
    if missing := wanted.keys() - saved.keys():
        return f"{len(missing)} missing"
    if any(tensor.is_meta for tensor in saved.values()):
        return "no values"
    return "true" if all(torch.equal(tensor.cpu(), wanted[name]) for name, tensor in saved.items()) else "GARBAGE"


def state_dict(arm: Arm) -> str:
    arm.send_out()
    return true_values(arm.model.state_dict())


def torch_save(arm: Arm) -> str:
    arm.send_out()
    with tempfile.TemporaryFile() as file:
        torch.save(arm.model.state_dict(), file)
        file.seek(0)
        return true_values(torch.load(file))


def save_pretrained(arm: Arm) -> str:
    from safetensors.torch import load_file

    arm.send_out()
    with tempfile.TemporaryDirectory() as folder:
        arm.model.save_pretrained(folder)
        return true_values(load_file(Path(folder) / "model.safetensors"))


# ------------------------------------------------------------------------------------------------------------ the table


Question = Callable[[Arm], str]


def questions() -> Iterator[tuple[str, bool, Question]]:
    """Each with its row's name, and whether it is asked of a tied model."""
    yield "logits without an edit", False, partial(same_logits, tied=False)
    for (moment, make), (name, edit) in product(MOMENTS.items(), EDITS.items()):
        yield f"{name} {moment}", False, partial(keeps_edit, edit=edit, moment=make)
    yield "tied: logits", True, partial(same_logits, tied=True)
    yield "tied: one parameter", True, same_parameter
    yield "tied: edit reaches both", True, edit_reaches_both
    yield "state_dict() when out", False, state_dict
    yield "torch.save when out", False, torch_save
    yield "save_pretrained when out", False, save_pretrained


def answer(tool: Tool, question: Question, *, tied: bool) -> str:
    """What came out, or the error's name: a peer's failure is a result."""
    try:
        with under(tool, tied=tied) as arm:
            return question(arm)
    except Exception as error:
        logging.getLogger(__name__).info("%s", tool.__name__, exc_info=error)
        return type(error).__name__


def main() -> None:
    """Asks every tool every question."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    tools = []
    for tool in TOOLS:
        package = tool.__name__.rpartition("_")[0]
        if importlib.util.find_spec(package) is None:
            print(f"{tool.__name__}: {package} is not installed, so it is not asked")
        else:
            tools.append(tool)
    print(f"{'':<26}" + "".join(f"{tool.__name__:>21}" for tool in tools))
    for name, tied, question in questions():
        print(f"{name:<26}" + "".join(f"{answer(tool, question, tied=tied):>21}" for tool in tools), flush=True)


if __name__ == "__main__":
    if "-v" in sys.argv:
        logging.basicConfig(level=logging.INFO)  # the tracebacks behind the errors
    main()
