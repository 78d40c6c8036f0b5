"""Loading and unloading the extension, what happens around cells, and how failures show.

Without these, a reload leaves two of everything, a plain ``%load_ext`` costs seconds, an exception in a callback prints
a block under every cell, and a notebook whose magic failed passes as green.
"""

import importlib
import subprocess
import sys
import textwrap
import threading
import warnings

import comm
import nbformat
import pytest
from jupyter_client.manager import start_new_kernel
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from place import until

import vram_magic as vm
from vram_magic import defaults
from vram_magic.journal import Record, StepTaken
from vram_magic.notebook.events import departures
from vram_magic.notebook.plain import is_plain

MIB = 2**20
LOAD = "%load_ext vram_magic\n%vram budget 64MiB\nimport torch\nfrom torch import nn"


def ours(shell):
    """How many of our callbacks, matchers and configurables the shell has."""
    callbacks = [f for fs in shell.events.callbacks.values() for f in fs if f.__module__.startswith("vram_magic")]
    matchers = [m for m in shell.Completer.custom_matchers if m.matcher_identifier == "vram_magic"]
    configurables = [c for c in shell.configurables if type(c).__name__ == "VRAMMagics"]
    magics = shell.magics_manager.magics["line"].keys() & {"vram", "load_model"}
    return len(callbacks), len(matchers), len(configurables), len(magics)


# ------------------------------------------------------------------------------------------------ in and out again


def test_loading_imports_neither_torch_nor_widgets_and_makes_no_manager():
    script = """
        import sys
        from IPython.core.interactiveshell import InteractiveShell
        shell = InteractiveShell.instance()
        shell.run_line_magic("load_ext", "vram_magic")
        shell.run_line_magic("vram", "help")
        shell.run_cell("1 + 1")
        heavy = {"torch", "ipywidgets", "tqdm", "pynvml", "vram_magic.vram_manager"}
        assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, capture_output=True)


def test_loading_twice_leaves_one_of_everything(bare_notebook):
    vm.load_ipython_extension(bare_notebook.shell)
    assert ours(bare_notebook.shell) == (2, 1, 1, 2)
    vm.load_ipython_extension(bare_notebook.shell)
    assert ours(bare_notebook.shell) == (2, 1, 1, 2)
    vm.unload_ipython_extension(bare_notebook.shell)
    assert ours(bare_notebook.shell) == (0, 0, 0, 0)


def test_reloading_leaves_one_of_everything(bare_notebook):
    bare_notebook.run("%load_ext vram_magic\n%reload_ext vram_magic\n%reload_ext vram_magic")
    for module in ("vram_magic.notebook.events", "vram_magic.notebook.magics", "vram_magic.notebook", "vram_magic"):
        importlib.reload(sys.modules[module])
    bare_notebook.run("%reload_ext vram_magic")
    assert ours(bare_notebook.shell) == (2, 1, 1, 2)
    bare_notebook.run("%unload_ext vram_magic")
    assert ours(bare_notebook.shell) == (0, 0, 0, 0)


def test_unloading_closes_the_manager_and_leaves_models_usable(notebook):
    notebook.run("%load_model tiny build\nx = torch.ones(1, 512, device=DEVICE); before = tiny(x).detach()")
    notebook.run("%vram evict tiny\nmgr = __import__('vram_magic').manager()")
    assert notebook["mgr"]["tiny"].device_bytes == 0
    notebook.run("%unload_ext vram_magic")
    assert "UsageError" in notebook.fail("%vram")
    notebook.run("there = tiny[0].weight.device  # an accelerator's stays where it was: on the CPU")
    notebook.run("assert torch.equal(tiny(x.to(there)), before.to(there))")
    with pytest.raises(vm.VRAMError, match="closed"):
        notebook["mgr"].make_room(1)


def traces(shell, folder):
    """All that may stay behind, by kind."""
    comms = getattr(comm.get_comm_manager(), "comms", {})
    hooks = {"guard": guards[-1].installed} if (guards := [m._guard for m in _open_managers() if m._guard]) else {}
    return {
        "callbacks": {name: len(functions) for name, functions in shell.events.callbacks.items()},
        "matchers": len(shell.Completer.custom_matchers),
        "configurables": [type(one).__name__ for one in shell.configurables],
        "magics": {kind: sorted(names) for kind, names in shell.magics_manager.magics.items()},
        "registry": sorted(shell.magics_manager.registry),
        "handlers": shell.custom_exceptions,
        "comms": len(comms),
        "threads": sorted(t.name for t in threading.enumerate() if t.name.startswith("vram-magic")),
        "files": [path for path in folder.rglob("*") if path.is_file()] if folder.exists() else [],
        "hooks": hooks,
        "options": dict(defaults.options),
        "plain": is_plain(),
    }


def _open_managers():
    module = sys.modules.get("vram_magic.vram_manager")
    return list(module._open.values()) if module else []


def test_three_rounds_of_loading_use_and_unloading_leave_nothing_of_any_kind_behind(bare_notebook, tmp_path):
    spill = tmp_path / "spill"
    bare_notebook.run("%config")  # IPython makes its own magics when the first one is asked for
    until(lambda: not any(thread.name.startswith("vram-magic") for thread in threading.enumerate()))  # of earlier tests
    before = traces(bare_notebook.shell, spill)
    for _ in range(3):
        bare_notebook.run("%load_ext vram_magic")
        bare_notebook.run(f"%config VRAMMagics.spill_dir = '{spill}'\n%config VRAMMagics.plain = True")
        bare_notebook.run("%vram budget 64MiB\nimport torch, vram_magic as vm\nfrom torch import nn\n%vram panel")
        bare_notebook.run("%load_model tiny nn.Linear(512, 512) --residency disk")
        bare_notebook.run("%vram evict tiny\n%vram doctor\n%vram log")
        bare_notebook.fail("%vram load nobody")
        guard = vm.manager()._guard
        assert guard is None or guard.installed
        during = traces(bare_notebook.shell, spill)
        assert [kind for kind in before if before[kind] == during[kind] and kind != "comms"] == []
        bare_notebook.run("%unload_ext vram_magic")
        until(lambda: traces(bare_notebook.shell, spill) == before)
        after = traces(bare_notebook.shell, spill)
        assert {kind: after[kind] for kind in after if after[kind] != before[kind]} == {}
        assert guard is None or not guard.installed


def test_unloading_what_was_never_loaded_is_harmless(bare_notebook):
    vm.unload_ipython_extension(bare_notebook.shell)
    assert ours(bare_notebook.shell) == (0, 0, 0, 0)


def test_a_magic_of_the_users_own_that_took_our_name_survives_unloading(notebook):
    notebook.run("from IPython.core.magic import register_line_magic")
    notebook.run("@register_line_magic\ndef vram(line): print('mine')")
    notebook.run("%unload_ext vram_magic")
    assert notebook.run("%vram") == "mine\n"


# ------------------------------------------------------------------------------------------------------ around cells


def test_one_line_tells_who_left_while_a_cell_ran(notebook):
    notebook.run("%load_model tiny build")
    assert notebook.run("x = torch.empty(62 * 2**20 // 4, device=DEVICE)") == (
        "vram_magic: tiny left (4.0 MiB) to make room for an allocation\n"
    )
    assert notebook.run("1;") == ""


def test_what_the_user_asked_for_is_no_news(notebook):
    notebook.run("%load_model tiny build")
    assert notebook.run("%vram evict tiny") == "freed 4.0 MiB\n"
    assert notebook.run("h = %load_model tiny build\nh.evict();") == ""


def test_a_quiet_cell_prints_nothing(notebook):
    notebook.run("%load_model tiny build")
    assert notebook.run("tiny(torch.ones(1, 512));") == ""


def test_a_cell_is_not_told_of_what_happened_before_it(notebook):
    notebook.run("%load_model tiny build")
    vm.manager().make_room("62MiB")
    assert notebook.run("1;") == ""


def test_the_first_cell_with_a_manager_is_told_too(bare_notebook):
    shown = bare_notebook.run(
        "%load_ext vram_magic\nimport torch, vram_magic\nfrom torch import nn\nfrom place import DEVICE\n"
        "mgr = vram_magic.manager()\nmgr.budget_bytes = '64MiB'\nnet = nn.Linear(1024, 1024, device=DEVICE)\n"
        "mgr.register('net', net)\nx = torch.empty(62 * 2**18, device=DEVICE)"
    )
    assert "vram_magic: net left (4.0 MiB)" in shown


def test_an_end_without_a_beginning_breaks_nothing(notebook, capsys):
    notebook.run("%load_model tiny build\nx = torch.empty(62 * 2**18, device=DEVICE)")
    for _ in range(3):
        notebook.shell.events.trigger("post_run_cell", None)
    notebook.run("")
    assert capsys.readouterr() == ("", "")


def test_trouble_in_a_callback_reaches_no_cell(notebook, monkeypatch):
    monkeypatch.setattr(vm.Journal, "__len__", lambda self: 1 / 0)
    assert notebook.run("1;") == ""


def took(model, size, stage="pass 1", asked_by="an allocation", blocks=1):
    return Record(asked_by, 1, 0, size, left=(StepTaken(model, blocks, size, stage, "because"),))


def test_several_departures_are_one_line_and_none_is_counted_twice():
    records = [took("a", MIB), took("b", 2 * MIB, asked_by="loading c"), took("a", MIB)]
    assert departures(records) == (
        "vram_magic: a (1.0 MiB, 1.0 MiB), b (2.0 MiB) left to make room for an allocation, loading c"
    )


def test_many_departures_are_still_one_readable_line():
    line = departures([took(f"{i}{'x' * 190}", MIB) for i in range(50)])
    assert "and 45 more left" in line
    assert len(line) < 400


def test_a_workspace_given_back_is_no_departure():
    assert departures([took("a", MIB, "workspace", blocks=0), took("a", MIB, "asked")]) == ""
    assert departures([]) == ""


# ---------------------------------------------------------------------------------------------------------- failures


def test_a_plain_cell_that_runs_out_of_memory_fails_with_the_few_lines(notebook):
    shown = notebook.fail("x = torch.empty(100 * 2**20, device=DEVICE)")
    assert shown.startswith(f"OutOfMemoryError: Not enough memory on {vm.manager().device}")
    assert len(shown.strip().splitlines()) == 4
    assert type(notebook.shell.last_execution_result.error_in_exec).__name__ == "OutOfMemoryError"
    assert sys.last_traceback is not None  # for %debug


def test_an_out_of_memory_that_we_did_not_refuse_shows_its_traceback(notebook):
    assert "Traceback" in notebook.fail("raise torch.OutOfMemoryError('of another kind')")


def test_the_users_own_handler_is_left_alone(bare_notebook):
    bare_notebook.run(
        "def mine(shell, kind, error, trace, tb_offset=None): print('mine:', kind.__name__)\n"
        "get_ipython().set_custom_exc((ArithmeticError,), mine)"
    )
    bare_notebook.run(LOAD)
    assert bare_notebook.fail("1 / 0") == "mine: ZeroDivisionError\n"
    bare_notebook.run("%unload_ext vram_magic")
    assert bare_notebook.fail("1 / 0") == "mine: ZeroDivisionError\n"


def test_unloading_takes_the_handler_out(notebook):
    assert notebook.shell.custom_exceptions
    notebook.run("%unload_ext vram_magic")
    assert notebook.shell.custom_exceptions == ()


# ---------------------------------------------------------------------------------------------------- in a real kernel


def executed(*cells):
    """The cells after they were run in a kernel of their own; the first that fails ends it."""
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        client = NotebookClient(book, timeout=250, startup_timeout=180, kernel_name="python3")
        try:
            client.execute()
        except CellExecutionError as error:
            book.metadata["error"] = str(error.ename)
    return book


def text_of(cell):
    return "".join(out.get("text", "") + out.get("data", {}).get("text/plain", "") for out in cell.outputs)


@pytest.mark.cpu_only("kernel")
def test_in_a_kernel_the_report_is_text_and_escaped_html():
    evil = "<img src=x onerror=alert(1)>"
    book = executed(
        LOAD,
        f"import vram_magic\nnet = nn.Linear(8, 8)\nvram_magic.manager().register({evil!r}, net)",
        "%vram",
    )
    (output,) = book.cells[2].outputs
    assert evil in output.data["text/plain"]
    assert "&lt;img src=x onerror=alert(1)&gt;" in output.data["text/html"]
    assert "<img" not in output.data["text/html"]


@pytest.mark.cpu_only("kernel")
def test_in_a_kernel_an_out_of_memory_fails_the_cell_with_the_few_lines():
    book = executed(
        LOAD,
        "h = %load_model tiny lambda: nn.Linear(1024, 1024, bias=False)",
        "x = torch.empty(61 * 2**18)",
        "y = torch.empty(100 * 2**20)",
    )
    assert text_of(book.cells[2]) == "vram_magic: tiny left (4.0 MiB) to make room for an allocation\n"
    (output,) = book.cells[3].outputs
    assert (book.metadata["error"], output.ename) == ("OutOfMemoryError", "OutOfMemoryError")
    assert len("\n".join(output.traceback).splitlines()) == 4


@pytest.mark.cpu_only("kernel")
@pytest.mark.parametrize("cell", ["%vram evict nobody", "%load_model x 17", "%vram nonsense"])
def test_in_a_kernel_a_failing_magic_fails_its_cell(cell):
    book = executed(LOAD, cell, "print('not reached')")
    assert book.metadata["error"] in ("UnknownModelError", "SourceError", "UsageError")
    assert not book.cells[2].outputs


@pytest.mark.cpu_only("kernel")
def test_in_a_kernel_the_panel_reaches_the_browser_while_a_cell_runs():
    manager, client = start_new_kernel(180, kernel_name="python3")
    try:
        client.execute_interactive(LOAD, timeout=120, output_hook=lambda message: None)
        shown = messages(client, "%vram panel")
        (view,) = [m["content"]["data"] for m in shown if m["msg_type"] == "display_data"]
        assert view["text/plain"].startswith("<vram_magic panel")
        cell = "import time, vram_magic as vm; net = nn.Linear(9, 9); vm.manager().register('net', net); time.sleep(4)"
        sent = [m["content"]["data"].get("state", {}) for m in messages(client, cell) if m["msg_type"] == "comm_msg"]
        assert any(row[0] == "net" for state in sent for row in state.get("state", {}).get("models", []))
        assert len(sent) <= 8  # of 16 looks: nothing is sent while nothing changes
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def messages(client, cell):
    """What the kernel sends to the browser until the cell has ended."""
    seen = []
    client.execute_interactive(cell, timeout=120, output_hook=seen.append)
    return seen
