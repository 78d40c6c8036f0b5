"""What the tests share: a notebook in this process, with the extension loaded."""

import gc
import sys

import pytest


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
    """A notebook with the extension, a budget of 64 MiB, and `build`, which builds a stack of 1 MiB layers."""
    bare_notebook.run("%load_ext vram_magic")
    bare_notebook.run("%vram budget 64MiB")
    bare_notebook.run("import gc, torch\nfrom torch import nn")
    bare_notebook.run(
        "def build(layers=4): return nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(layers)])"
    )
    return bare_notebook
