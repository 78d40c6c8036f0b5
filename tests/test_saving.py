"""Whatever a module carries, it is saved, copied and pickled with true values and at its true size, evicted or not.

Without this a checkpoint of an offloaded model holds nothing, or all of a file, and the loss shows at its next load.
"""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from place import DEVICE, same_values
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import nn
from torch.nn.utils import parametrizations
from transformers import LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

import vram_magic as vm

SIZE = 64


@pytest.fixture
def manager_options():
    return {"block_bytes": "8KiB", "host_budget": 0}  # each weight is a block


# --- what a module may carry ------------------------------------------------------------------------------------------


class Plain(nn.Module):
    """Modules of these tests are top-level classes, so that they can be pickled."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = (nn.Linear(SIZE, SIZE, device=DEVICE) for _ in range(2))


class Tied(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.last.weight = self.first.weight


class Slices(Plain):
    """Overlapping and disjoint slices of one buffer."""

    def __init__(self) -> None:
        super().__init__()
        base = torch.arange(900.0, device=DEVICE)
        self.low, self.high, self.far = nn.Parameter(base[:400]), nn.Parameter(base[300:600]), nn.Parameter(base[700:])


class Attributes(Plain):
    """Views of a weight in plain attributes: alone, in a list, in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.head = self.first.weight.detach()[:2]
        self.rows = [self.first.weight.detach()[index] for index in range(3)]
        self.named = {"bias": self.last.bias.detach()}


class Buffers(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passing", torch.arange(500.0, device=DEVICE), persistent=False)
        self.register_buffer("absent", None)
        self.register_buffer("expanded", torch.arange(7.0, device=DEVICE).expand(5, 7))
        self.register_buffer("scalar", torch.tensor(3.5, dtype=torch.float64, device=DEVICE))
        self.register_buffer("empty", torch.empty(0, 4, device=DEVICE))
        self.register_buffer("switches", torch.arange(9, device=DEVICE) % 2 == 0)
        self.register_buffer("counts", torch.arange(9, device=DEVICE, dtype=torch.int64))
        self.register_buffer("waves", torch.polar(torch.ones(9), torch.arange(9.0)).to(DEVICE))
        self.register_buffer("tiny", torch.arange(8, dtype=torch.uint8, device=DEVICE).view(torch.float8_e4m3fn))


class Layouts(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Conv2d(8, 8, 3, device=DEVICE).to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.randn(6, 9, device=DEVICE).t())
        self.gaps = nn.Parameter(torch.randn(6, 9, device=DEVICE)[:, ::2])


class Lists(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.items = nn.ParameterList([torch.randn(50, device=DEVICE) for _ in range(3)])
        self.names = nn.ParameterDict({"a": torch.randn(50, device=DEVICE)})
        self.again = nn.ModuleList([self.first, self.last, self.first])  # shared sub-modules


class Recurrent(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(16, 32, 2, bidirectional=True, device=DEVICE)


class Frozen(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(requires_grad=False)
        self.whole = nn.Parameter(torch.arange(9, device=DEVICE), requires_grad=False)
        self.eval()


class Extra(Plain):
    def get_extra_state(self):
        return {"amax": 1}

    def set_extra_state(self, state):
        assert state == {"amax": 1}


class Odd(Plain):
    """A sparse buffer and one that is lazily conjugated: they cannot leave, the rest can (case: format-unsupported)."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sparse", torch.eye(4, device=DEVICE).to_sparse() if DEVICE == "cpu" else None)
        self.register_buffer("conjugate", torch.polar(torch.ones(9), torch.arange(9.0)).to(DEVICE).conj())


MODULES = [Plain, Tied, Slices, Attributes, Buffers, Layouts, Lists, Recurrent, Frozen, Extra, Odd]


def tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))


def dense(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().cpu()
    tensor = tensor.to_dense() if tensor.is_sparse else tensor
    return tensor.resolve_conj()


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        mine, right = dense(tensor), dense(other[name])
        assert (mine.dtype, mine.shape) == (right.dtype, right.shape), name
        assert mine.reshape(-1).view(torch.uint8).equal(right.reshape(-1).view(torch.uint8)), name


def bring_to(when: str, mgr: vm.VRAMManager, handle: vm.Handle) -> None:
    handle.evict()
    if when != "evicted":
        handle.load()
    if when == "half evicted":
        mgr.make_room(mgr.free_bytes + 1)
        assert handle.state == "partial"


WHEN = ["evicted", "half evicted", "returned"]


def copied(module: nn.Module) -> nn.Module:
    return copy.deepcopy(module)


def pickled(module: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(module))


def saved(module: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(module, buffer)
    return torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)


def filled(module: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(module.state_dict(), buffer)
    fresh = type(module)()
    passing = {name for name in tensors(module) if name not in module.state_dict()}
    # torch cannot write into an expanded buffer.
    fresh.load_state_dict(torch.load(io.BytesIO(buffer.getvalue())), assign=isinstance(module, Buffers))
    assert passing <= {"passing"}
    return fresh


# cases: tied-save-error, state-dict-of-evicted, requires-grad-lost, odd-dtypes-numpy, lstm-flat-weights, extra-state
@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("way", [copied, pickled, saved, filled], ids=lambda way: way.__name__)
@pytest.mark.parametrize("kind", MODULES)
def test_a_copy_made_in_any_way_has_true_values_and_is_a_module_of_its_own(mgr, kind, way: Callable, when):
    module, twin = kind(), kind()
    if (kind, way) == (Buffers, pickled):
        del module.tiny, twin.tiny  # `pickle` alone does not know float8
    handle = mgr.register("module", module)
    bring_to(when, mgr, handle)
    state = handle.state
    other = way(module)
    assert_same(tensors(other), tensors(twin))
    assert handle.state == state
    if way is not filled:
        assert [p.requires_grad for p in other.parameters()] == [p.requires_grad for p in twin.parameters()]
    with torch.no_grad():
        other.first.weight.zero_()
    assert_same(tensors(module), tensors(twin))
    handle.load()
    assert_same(tensors(module), tensors(twin))
    assert [t.stride() for t in tensors(module).values() if not t.is_sparse] == [
        t.stride() for t in tensors(twin).values() if not t.is_sparse
    ]


@pytest.mark.parametrize("kind", [Slices, Attributes, Lists, Tied])
def test_what_shares_memory_still_does(mgr, kind):
    module = kind()
    handle = mgr.register("module", module)
    storages = [t.untyped_storage().data_ptr() for t in tensors(module).values()]
    shared = [storages.index(pointer) for pointer in storages]
    total = handle.total_bytes
    for when in WHEN:
        bring_to(when, mgr, handle)
        storages = [t.untyped_storage().data_ptr() for t in tensors(module).values()]
        assert [storages.index(pointer) for pointer in storages] == shared
        assert handle.total_bytes == total
        if kind is Attributes:
            module.first.weight.data.add_(1)
            assert same_values(module.head, module.first.weight.detach()[:2])
            assert all(same_values(row, module.first.weight.detach()[i]) for i, row in enumerate(module.rows))


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("kind", [Plain, Tied, Recurrent, Frozen])
def test_it_is_saved_by_save_model_and_save_file(mgr, tmp_path, kind, when):
    module, twin, fresh = kind(), kind(), kind()
    handle = mgr.register("module", module)
    bring_to(when, mgr, handle)
    nn.init.zeros_(fresh.first.weight)
    save_model(module, tmp_path / "model.safetensors")
    load_model(fresh, tmp_path / "model.safetensors")
    assert_same(tensors(fresh), tensors(twin))
    alone = {name: tensor.contiguous() for name, tensor in module.first.state_dict().items()}
    save_file(alone, tmp_path / "first.safetensors")
    assert_same(load_file(tmp_path / "first.safetensors"), twin.first.state_dict())


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("wrap", [parametrizations.weight_norm, parametrizations.orthogonal])
def test_a_parametrized_module_is_saved_as_it_is(mgr, wrap, when):
    module = wrap(nn.Linear(SIZE, SIZE, device=DEVICE))
    before = {name: tensor.cpu().clone() for name, tensor in module.state_dict().items()}
    handle = mgr.register("module", module)
    bring_to(when, mgr, handle)
    buffer = io.BytesIO()
    torch.save(module.state_dict(), buffer)
    assert_same(torch.load(io.BytesIO(buffer.getvalue())), before)


# --- sizes ------------------------------------------------------------------------------------------------------------


def bytes_of(thing: object) -> int:
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    return len(buffer.getvalue())


@pytest.mark.parametrize("backed", [True, False], ids=["file", "spill file"])
@pytest.mark.parametrize("when", WHEN)
def test_nothing_is_saved_larger_than_it_is(mgr, tmp_path, when, backed):
    module, twin = Plain(), Plain()
    save_file(twin.state_dict(), tmp_path / "plain.safetensors")
    handle = mgr.register("module", module, source=tmp_path / "plain.safetensors" if backed else None)
    bring_to(when, mgr, handle)
    slack = 2048  # names, and what says where the tensors were
    assert bytes_of(module.state_dict()) <= bytes_of(twin.state_dict()) + slack
    assert bytes_of(module.last.bias) <= bytes_of(twin.last.bias) + slack
    assert len(pickle.dumps(module)) <= len(pickle.dumps(twin)) + slack
    assert copy.deepcopy(module.last.bias).untyped_storage().nbytes() == twin.last.bias.nbytes


# --- save_pretrained --------------------------------------------------------------------------------------------------


def opt() -> OPTForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 64, "ffn_dim": 128, "word_embed_proj_dim": 64}
    config = OPTConfig(**sizes, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=32)
    return OPTForCausalLM(config).eval()


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128}
    config = LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=2, tie_word_embeddings=False)
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("build", [opt, llama])
@pytest.mark.parametrize("shards", [{}, {"max_shard_size": "100KB"}], ids=["one file", "shards"])
def test_save_pretrained_writes_true_weights(mgr, tmp_path, build, shards, when):
    build().save_pretrained(tmp_path / "first")
    handle = mgr.load("model", tmp_path / "first")
    with torch.no_grad():
        handle.model.lm_head.weight[3] = 5
    bring_to(when, mgr, handle)
    handle.model.save_pretrained(tmp_path / "second", **shards)
    wanted = build()
    with torch.no_grad():
        wanted.lm_head.weight[3] = 5
    assert_same(type(wanted).from_pretrained(tmp_path / "second").state_dict(), wanted.state_dict())


# A file that is written over while it is mapped kills who reads it: so in a process of its own.
OVER_ITSELF = """
import sys
from place import DEVICE
import torch
import vram_magic as vm
from transformers import OPTForCausalLM

options = eval(sys.argv[1])
mgr = vm.VRAMManager(device=DEVICE, budget="64MiB", block_bytes="16KiB")

def check(model):
    found = model.state_dict()
    assert found.keys() == before.keys()
    wrong = [name for name in before if not torch.equal(found[name].cpu(), before[name])]
    assert not wrong, wrong

for folder, when in zip(sys.argv[2:], ("evicted", "half evicted", "returned"), strict=True):
    handle = mgr.load("model", folder)
    model = handle.model
    before = {name: tensor.cpu().clone() for name, tensor in model.state_dict().items()}
    model.lm_head.weight.data[3] = before["lm_head.weight"][3] = 5
    before["model.decoder.embed_tokens.weight"] = before["lm_head.weight"]  # they are tied
    handle.evict()
    if when != "evicted":
        handle.load()
    if when == "half evicted":
        mgr.make_room(mgr.free_bytes + 1)
        assert handle.state == "partial"
    for _ in range(2):
        model.save_pretrained(folder, **options)
        check(model)
        check(OPTForCausalLM.from_pretrained(folder))
        for move in (handle.load, handle.evict, handle.load, handle.evict):
            move()
            check(model)
    again = mgr.load("again", folder)
    again.evict()
    check(again.model)
    print(when, flush=True)
mgr.close()
check(model)
print("alive")
"""


@pytest.mark.parametrize("options", [{}, {"max_shard_size": "100KB"}], ids=["one file", "shards"])
def test_save_pretrained_over_the_very_folder_that_it_came_from(tmp_path: Path, options):
    folders = [str(tmp_path / name) for name in "abc"]
    for folder in folders:
        opt().save_pretrained(folder, **options)
    command = [sys.executable, "-c", OVER_ITSELF, repr(options), *folders]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.splitlines() == ["evicted", "half evicted", "returned", "alive"], done.stderr[-2000:]
    assert done.returncode == 0


@pytest.mark.parametrize("when", WHEN)
def test_save_file_over_the_very_file_that_backs_it(mgr, tmp_path, when):
    module, twin = Plain(), Plain()
    path = tmp_path / "plain.safetensors"
    save_file(module.state_dict(), path)
    handle = mgr.register("module", module, source=path)
    bring_to(when, mgr, handle)
    for _ in range(2):
        save_file(module.state_dict(), path)
        for move in (handle.load, handle.evict):
            move()
            assert_same(tensors(module), tensors(twin))
        assert_same(load_file(path), twin.state_dict())
