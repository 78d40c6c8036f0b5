"""What the tests share: the device that they run on, its manager, and a notebook in this process.

By default all run on the CPU; with ``VRAM_MAGIC_TEST_DEVICE=cuda`` the same ones run on a simulated GPU (`simulated`),
which must be in the process before torch is: so `place` is imported first of all.
"""

import contextlib
import gc
import os
import sys
from pathlib import Path

import pytest
from simulated import SimulationUnavailable

_missing = ""
try:
    from place import DEVICE
except SimulationUnavailable as reason:
    _missing, DEVICE = str(reason), ""

__all__ = ["DEVICE"]

CPU_ONLY = {
    "bitsandbytes": "its kernels for CUDA are real ones",
    "no device": "it touches no device, so one run is enough",
    "numpy": "numpy sees tensors of the CPU only",
    "allocator": "it is about torch's CPU allocator and its guard",
    "kernel": "a kernel of its own starts without the simulation",
    "fork": "a forked child cannot use a CUDA device at all",
}
"""Why a test marked ``cpu_only(KEY)`` is skipped on the simulated GPU."""

# Scripts that tests start find `place`.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))


def pytest_configure(config):
    if _missing:
        pytest.exit(f"all tests are skipped: {_missing}", returncode=0)
    config.addinivalue_line("markers", "cpu_only(key): skipped on the simulated GPU, for the reason in conftest.py")
    config.addinivalue_line("markers", "simulation_only: skipped without the simulated GPU")


def pytest_collection_modifyitems(items):
    for item in items:
        marker = item.get_closest_marker("cpu_only")
        if marker and DEVICE != "cpu":
            item.add_marker(pytest.mark.skip(reason=f"not on the simulated GPU: {CPU_ONLY[marker.args[0]]}"))
        elif item.get_closest_marker("simulation_only") and DEVICE == "cpu":
            item.add_marker(pytest.mark.skip(reason="not on the simulated GPU: VRAM_MAGIC_TEST_DEVICE=cuda"))


def pytest_collection_finish():
    """Half a million objects of imported modules are no garbage: collections need not look at them, test after test."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def manager_options():
    """What a file's `mgr` is made with, besides the device; files replace it."""
    return {}


@pytest.fixture
def mgr(tmp_path, manager_options):
    """A manager of the device with much room, blocks of 1 MiB, and a spill folder of its own."""
    import vram_magic as vm

    options = {"budget": "1GiB", "block_bytes": "1MiB", "spill_dir": tmp_path / "spill"} | manager_options
    with contextlib.closing(vm.VRAMManager(device=DEVICE, **options)) as manager:
        if manager.used_bytes:
            gc.collect()  # what an earlier test's traceback held would be freed in the middle of this one
        yield manager


class Notebook:
    """A shell to run cells in, and what they print."""

    def __init__(self, shell, capsys):
        self.shell = shell
        self._capsys = capsys

    def run(self, cell):
        """What the cell shows; it must succeed."""
        succeeded, shown = self._result_of(cell)
        assert succeeded, shown
        return shown

    def fail(self, cell):
        """What the cell shows; it must fail."""
        succeeded, shown = self._result_of(cell)
        assert not succeeded, shown
        return shown

    def __getitem__(self, name):
        return self.shell.user_ns[name]

    def _result_of(self, cell):
        self._capsys.readouterr()
        success = self.shell.run_cell(cell, store_history=True).success
        shown = self._capsys.readouterr()
        return success, shown.out + shown.err


@pytest.fixture
def bare_notebook(capsys, tmp_path, monkeypatch):
    """A notebook without the extension."""
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])  # the shell puts its own there
    config = Config()
    config.HistoryManager.hist_file = ":memory:"
    config.InteractiveShell.colors = "nocolor"
    InteractiveShell.clear_instance()
    shell = InteractiveShell.instance(config=config)
    yield Notebook(shell, capsys)
    shell.run_line_magic("unload_ext", "vram_magic")
    _let_go_of(shell)


def _let_go_of(shell):
    """Frees what the cells made: tensors that live on would count in the next test."""
    from IPython.core.interactiveshell import InteractiveShell

    for place in (shell.user_ns, shell.user_ns_hidden, shell.history_manager.output_hist):
        place.clear()
    shell.displayhook._ = shell.displayhook.__ = shell.displayhook.___ = shell.last_execution_result = None
    InteractiveShell.clear_instance()
    if hasattr(sys, "last_value"):  # some cell failed: its frames hold what it had
        for name in ("last_type", "last_value", "last_traceback", "last_exc"):
            vars(sys).pop(name, None)
        shell.InteractiveTB.tb = None
        gc.collect()


@pytest.fixture
def notebook(bare_notebook):
    """A notebook with the extension, a budget of 64 MiB, and `build`, which builds a stack of 1 MiB layers there."""
    bare_notebook.run("%load_ext vram_magic")
    bare_notebook.run("%vram budget 64MiB")
    bare_notebook.run("import gc, torch\nfrom torch import nn\nfrom place import DEVICE")
    bare_notebook.run(
        "def build(layers=4):\n"
        "    return nn.Sequential(*[nn.Linear(512, 512, bias=False, device=DEVICE) for _ in range(layers)])"
    )
    return bare_notebook


@pytest.fixture
def whole_device():
    """A simulated GPU of 2 GiB for this test alone; nothing on the CPU."""
    from place import DEVICE

    if DEVICE == "cpu":
        yield
        return
    import simulated
    import torch

    gc.collect()
    torch.cuda.empty_cache()
    simulated.set_capacity(2 << 30)
    yield
    simulated.set_foreign(0)
    simulated.set_integrated(False)
    simulated.set_capacity(simulated.CAPACITY_BYTES)
