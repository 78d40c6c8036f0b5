"""`%vram save` and `%vram restore`: a kernel's models after a restart.

Without these, a restarted kernel may come back with other tiers, weights read at once, code run from a file, or half
of the models because one file is missing; and a mistyped name may cost a file of somebody else's.
"""

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import vram_magic as vm


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=128)).save_pretrained(tmp_path / "gpt")
    return tmp_path / "gpt"


@pytest.fixture
def file(tmp_path):
    return tmp_path / "models.json"


def restarted(notebook):
    """As good as a new kernel: no manager, no variables."""
    notebook.run("%unload_ext vram_magic")
    notebook.shell.run_line_magic("reset", "-f")
    notebook.run("import torch\nfrom torch import nn\nfrom place import DEVICE\n%load_ext vram_magic")
    assert not vm.manager().models


def test_models_come_back_with_their_marks_and_load_at_first_use(notebook, folder, file):
    notebook.run("import vram_magic as vm; vm.manager().tiers['judge'] = 7")
    notebook.run(f"%load_model a {folder} --tier judge --residency disk --pin")
    notebook.run(f"%load_model b {folder} --priority -2 --dtype bfloat16")
    notebook.run("x = torch.arange(8, device=DEVICE)[None]; out = a(x).logits.cpu().detach()")
    expected = notebook.shell.user_ns["out"]
    assert notebook.run(f"%vram save {file}") == f"2 of 2 models can be restored from {file}\n"
    restarted(notebook)
    shown = notebook.run(f"%vram restore {file}")
    assert "2 models are back, to be loaded at first use: b, a\n" in shown
    mgr = vm.manager()
    assert mgr.budget_bytes == 64 * 2**20
    assert (mgr["a"].tier, mgr["a"].priority, mgr["a"].residency, mgr["a"].pinned) == ("judge", 7, "disk", True)
    assert (mgr["b"].tier, mgr["b"].pinned) == (-2, False)
    assert mgr["a"].device_bytes == 0
    assert notebook.shell.user_ns["b"].dtype == torch.bfloat16
    notebook.run("out = a(torch.arange(8, device=DEVICE)[None]).logits.cpu().detach()")
    assert torch.equal(notebook.shell.user_ns["out"], expected)
    assert mgr["a"].state == "device"


def test_what_code_built_is_named_and_not_run(notebook, folder, file):
    notebook.run("%load_model net nn.Linear(8, 8)")
    notebook.run(f"%load_model a {folder}")
    shown = notebook.run(f"%vram save {file}")
    assert shown.startswith(f"1 of 2 models can be restored from {file}\n")
    assert "net will not come back: it was built by code of the notebook; run that again" in shown
    restarted(notebook)
    shown = notebook.run(f"%vram restore {file}")
    assert "1 model is back" in shown
    assert "net did not come back" in shown
    assert list(vm.manager().models) == ["a"]


def test_a_missing_source_does_not_keep_the_others_away(notebook, folder, file, tmp_path):
    gone = folder.with_name("gone")
    folder.rename(gone)
    notebook.run(f"%load_model first {gone}")
    gone.rename(folder)
    notebook.run(f"%load_model second {folder}")
    notebook.run(f"%vram save {file}")
    restarted(notebook)
    shown = notebook.run(f"%vram restore {file}")
    assert "1 model is back, to be loaded at first use: second" in shown
    assert "first did not come back: " in shown


def test_a_model_loaded_again_from_its_own_variable_is_still_known_by_its_source(notebook, folder, file):
    notebook.run(f"%load_model a {folder} --dtype bfloat16")
    notebook.run("%load_model a a")
    assert notebook.run(f"%vram save {file}") == f"1 of 1 model can be restored from {file}\n"
    (entry,) = json.loads(file.read_text())["models"]
    assert (entry["source"], entry["dtype"]) == (str(folder), "bfloat16")
    notebook.run("%load_model a a --dtype float32\n" + f"%vram save {file}")
    (entry,) = json.loads(file.read_text())["models"]
    assert (entry["source"], entry["dtype"]) == (str(folder), "float32")


def test_restoring_twice_changes_nothing(notebook, folder, file):
    notebook.run(f"%load_model a {folder}")
    notebook.run(f"%vram save {file}")
    same = notebook.shell.user_ns["a"]
    notebook.run(f"%vram restore {file}")
    assert notebook.shell.user_ns["a"] is same


@pytest.mark.parametrize(
    "change",
    [
        lambda kept: kept | {"format": "else"},
        lambda kept: kept | {"budget": [1]},
        lambda kept: kept | {"models": [{"name": "a"}]},
        lambda kept: kept | {"models": [kept["models"][0] | {"residency": "moon"}]},
        lambda kept: kept | {"tiers": {"x": "y"}},
        lambda kept: kept | {"tiers": {"x\x1b[31m": 1}},
        lambda kept: kept | {"tiers": []},
        lambda kept: kept | {"budget": -5},
        lambda kept: kept | {"budget": True},
        lambda kept: kept | {"budget": 10**30},
        lambda kept: kept | {"models": [kept["models"][0] | {"dtype": "f\x1b[31m"}]},
        lambda kept: kept | {"models": {"a": 1}},
        lambda kept: [],
    ],
)
def test_a_file_that_is_none_is_an_error_and_changes_nothing(notebook, folder, file, change):
    notebook.run(f"%load_model a {folder}")
    notebook.run(f"%vram save {file}")
    file.write_text(json.dumps(change(json.loads(file.read_text()))))
    restarted(notebook)
    before = vm.manager().budget_bytes
    shown = notebook.fail(f"%vram restore {file}")
    assert shown.startswith("SourceError: No models can be restored from")
    assert len(shown.splitlines()) == 4
    assert "no file written by %vram save" in shown or "It was changed since %vram save wrote it: " in shown
    assert not vm.manager().models
    assert vm.manager().budget_bytes == pytest.approx(before, rel=0.2)  # "auto" follows the machine


def test_files_that_cannot_be_read_or_written(notebook, tmp_path):
    shown = notebook.fail(f"%vram restore {tmp_path}/none")
    assert shown.startswith("SourceError: No models can be restored")
    assert "There is no such file." in shown
    assert f"%vram save {tmp_path}" not in shown
    assert "Is a directory" in notebook.fail(f"%vram restore {tmp_path}")
    shown = notebook.fail(f"%vram save {tmp_path}/none/file")
    assert shown.startswith("VRAMError: The models cannot be written down.")
    assert [path.name for path in tmp_path.iterdir()] == ["ipython"]


@pytest.mark.parametrize("content", ["print('mine')\n", "", "{}", '{"format": "else"}', "[1]", "\udcff"])
def test_a_file_of_somebody_elses_is_neither_replaced_nor_restored(notebook, file, content):
    file.write_bytes(content.encode(errors="surrogateescape"))
    before = file.read_bytes()
    shown = notebook.fail(f"%vram save {file}")
    assert shown.startswith("VRAMError: The models cannot be written down.")
    assert len(shown.splitlines()) == 4
    assert file.read_bytes() == before
    shown = notebook.fail(f"%vram restore {file}")
    assert "\nIt is no file written by %vram save.\n" in shown
    assert "KeyError" not in shown


def test_a_file_of_ours_is_replaced(notebook, folder, file):
    notebook.run(f"%vram save {file}")
    notebook.run(f"%load_model a {folder}\n%vram save {file}")
    assert [entry["name"] for entry in json.loads(file.read_text())["models"]] == ["a"]


def test_weights_read_into_a_module_of_the_notebook_are_named_only(notebook, file, tmp_path):
    save_file(nn.Linear(8, 8).state_dict(), tmp_path / "net.safetensors")
    notebook.run(f"%load_model net {tmp_path}/net.safetensors --into nn.Linear(8, 8, device=DEVICE)")
    assert "net will not come back" in notebook.run(f"%vram save {file}")
    assert json.loads(file.read_text())["models"][0]["source"] is None


def test_a_file_takes_the_place_of_nothing_in_the_notebook(notebook, folder, file):
    for name in ("precious", "print"):
        notebook.run(f"%load_model {name} {folder}")
    notebook.run("vm = __import__('vram_magic'); vm.manager().tiers['judge'] = 7")
    notebook.run(f"%vram save {file}")
    restarted(notebook)
    notebook.run("vm = __import__('vram_magic'); vm.manager().tiers['judge'] = 3; precious = 42")
    shown = notebook.run(f"%vram restore {file}")
    assert "precious did not come back: that name has another meaning here" in shown
    assert "print did not come back" in shown
    assert notebook["precious"] == 42
    assert "print" not in notebook.shell.user_ns
    assert vm.manager().tiers["judge"] == 3
    assert not vm.manager().models


def test_whatever_a_library_raises_for_one_keeps_no_other_away(notebook, folder, file):
    notebook.run(f"%load_model a {folder}")
    notebook.run(f"%vram save {file}")
    kept = json.loads(file.read_text())
    kept["models"].insert(0, kept["models"][0] | {"name": "b", "source": "~nobody-of-this-name/x"})
    file.write_text(json.dumps(kept))
    restarted(notebook)
    shown = notebook.run(f"%vram restore {file}")
    assert "b did not come back: " in shown
    assert list(vm.manager().models) == ["a"]


def test_a_dtype_of_torch_is_written_by_its_name(notebook, folder, file):
    handle = vm.manager().load("a", str(folder), dtype=torch.bfloat16)
    notebook.run(f"%vram save {file}")
    assert json.loads(file.read_text())["models"][0]["dtype"] == "bfloat16"
    assert handle is not None
