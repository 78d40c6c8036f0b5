"""`%config VRAMMagics`: settings with units, from the line, from IPython's configuration, and from `%vram budget`.

Without these, a setting may be shown and not hold, hold only for managers that a magic made, or stay behind when the
extension is unloaded.
"""

import pytest
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

import vram_magic as vm
from vram_magic import defaults
from vram_magic.notebook.magics import VRAMMagics

MIB = 2**20


def magics(notebook):
    return notebook.shell.magics_manager.registry["VRAMMagics"]


@pytest.fixture
def early(bare_notebook):
    """The extension is loaded and there is no manager yet."""
    bare_notebook.run("%load_ext vram_magic")
    return bare_notebook


def test_the_budget_takes_effect_at_once_and_shows_what_the_magic_sets(notebook):
    notebook.run("%config VRAMMagics.budget = '96MiB'")
    assert vm.manager().budget_bytes == 96 * MIB
    notebook.run("%vram budget 48MiB")
    assert magics(notebook).budget == "48MiB"
    notebook.run("%vram budget 50000000")
    assert magics(notebook).budget == "50000000"  # no unit says it exactly
    notebook.run("%config VRAMMagics.budget = '0.0625GiB'")
    notebook.run("%vram")
    assert magics(notebook).budget == "0.0625GiB"  # as it was written
    notebook.run("%vram budget auto")
    assert magics(notebook).budget == "auto"
    assert vm.manager().budget_setting == "auto"


# IPython logs what a setting raises, and goes on.


def test_a_budget_that_cannot_be_is_told_and_the_old_one_stays(notebook, caplog):
    notebook.run("%load_model net build(8) --pin")
    notebook.run("%config VRAMMagics.budget = '4MiB'")
    assert "Held by: net" in caplog.text
    assert (magics(notebook).budget, vm.manager().budget_bytes) == ("64MiB", 64 * MIB)
    notebook.run("%config VRAMMagics.budget = 'plenty'")
    assert "plenty" in caplog.text
    assert vm.manager().budget_bytes == 64 * MIB


def test_whoever_makes_the_manager_makes_it_with_the_settings(early, tmp_path):
    early.run("%config VRAMMagics.budget = '32MiB'")
    early.run("%config VRAMMagics.block_bytes = '1MiB'")
    early.run(f"%config VRAMMagics.spill_dir = '{tmp_path}/spill'")
    early.run("%config VRAMMagics.host_budget = '0B'")
    early.run("import vram_magic as vm; from torch import nn; from place import DEVICE; mgr = vm.manager()")
    assert early["mgr"].budget_bytes == 32 * MIB
    early.run("net = nn.Sequential(*[nn.Linear(512, 512, bias=False, device=DEVICE) for _ in range(3)])")
    early.run("%load_model net net")
    assert vm.manager()["net"].blocks == (3, 3)
    early.run("%vram evict net")
    assert list((tmp_path / "spill").rglob("*.weights"))


@pytest.mark.parametrize("setting", ["block_bytes = '1MiB'", "host_budget = '1MiB'", "spill_dir = '/tmp'"])
def test_what_comes_too_late_is_refused_and_the_way_out_is_told(notebook, setting, caplog):
    before = getattr(magics(notebook), setting.split()[0])
    notebook.run(f"%config VRAMMagics.{setting}")
    assert f"{setting.split()[0]} cannot be set any more." in caplog.text
    assert "%unload_ext vram_magic" in caplog.text
    assert getattr(magics(notebook), setting.split()[0]) == before


def test_the_line_under_a_cell_can_be_turned_off(notebook):
    notebook.run("%load_model net build")
    notebook.run("import vram_magic as vm")
    makes_leave = "t = torch.empty(vm.manager().free_bytes + 1, dtype=torch.uint8, device=DEVICE); del t"
    assert "net left" in notebook.run(makes_leave)
    notebook.run("%vram load net\n%config VRAMMagics.tell_departures = False")
    assert notebook.run(makes_leave) == ""
    assert "left: net" in notebook.run("%vram log")


def test_settings_of_a_profile_hold():
    shell = InteractiveShell(config=Config({"VRAMMagics": {"budget": "16MiB", "keep_failed_frames": True}}))
    made = VRAMMagics(shell)
    assert (made.options()["budget"], made.keep_failed_frames) == ("16MiB", True)


def test_each_setting_tells_its_unit_and_when_it_holds(notebook):
    shown = notebook.run("%config VRAMMagics")
    for name in VRAMMagics.class_trait_names(config=True):
        assert f"VRAMMagics.{name}=" in shown
    assert shown.count("such as '") == 3
    assert shown.count("before the first model") == 3


def test_settings_go_with_the_extension(notebook):
    notebook.run("%config VRAMMagics.budget = '96MiB'")
    notebook.run("%unload_ext vram_magic")
    assert defaults.options == {}
    assert "VRAMMagics" not in notebook.run("%config")
    with vm.manager() as mgr:
        assert mgr.budget_setting == "auto"
