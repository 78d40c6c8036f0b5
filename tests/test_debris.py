"""What a cell that ran out of memory leaves behind, and when it goes.

Without this the tensors of a failed call stay until the kernel is restarted: the cell, run again, has less room each
time. And the other way round: a failure that was to be looked at is gone, or a user's own variable with it.
"""

import gc
import sys
import traceback

import pytest
from jupyter_client.manager import start_new_kernel

import vram_magic as vm
from vram_magic.notebook import debris

MIB = 2**20

STEP = """
def eight():
    return torch.ones(2 * 2**20, device=DEVICE)  # 8 MiB

def step():
    batch = eight()
    return batch, torch.empty(100 * 2**20, device=DEVICE)
"""


@pytest.fixture
def failing(notebook):
    """A notebook where `step()` runs out of memory, holding 8 MiB."""
    notebook.run(STEP)
    return notebook


def held_bytes():
    return vm.manager().used_bytes


# --------------------------------------------------------------------------------------------------- the next cell


def test_the_next_cell_has_the_memory_back_and_one_line_says_so(failing):
    before = held_bytes()
    shown = failing.fail("step()")
    assert "released" not in shown
    assert held_bytes() == before + 8 * MIB
    assert failing.run("now = __import__('vram_magic').manager().used_bytes") == (
        "vram_magic: released 8.0 MiB that the failed cell still held\n"
    )
    assert failing["now"] == before
    assert failing.run("1;") == ""


def test_it_goes_before_any_model_has_to_leave(failing):
    failing.run("%load_model tiny build")
    failing.fail("step()")
    shown = failing.run("x = torch.empty(55 * 2**18, device=DEVICE)")  # no room for the debris
    assert shown == "vram_magic: released 8.0 MiB that the failed cell still held\n"
    assert vm.manager()["tiny"].state == "device"


@pytest.mark.parametrize("cell", ["step()", "raise torch.OutOfMemoryError('of another kind')"])
def test_nothing_refers_to_the_failure_any_more(failing, cell):
    failing.fail(cell)
    failing.run("pass")
    assert not {"last_type", "last_value", "last_traceback", "last_exc"} & vars(sys).keys()
    assert vars(failing.shell.InteractiveTB).get("tb") is None
    assert "No traceback available" in failing.run("%tb")


def test_the_last_error_that_the_manager_keeps_holds_no_frame(failing):
    failing.fail("step()")
    error = vm.manager().last_error
    assert (error.__traceback__, error.__context__, error.__cause__) == (None, None, None)


def test_the_same_cell_again_and_again_has_as_much_room_as_the_first_time(failing):
    failing.fail("step()")
    held = held_bytes()
    for _ in range(5):
        failing.fail("step()")
        assert held_bytes() == held


def test_less_than_a_mebibyte_is_released_without_a_word(notebook):
    notebook.run(STEP.replace("2 * 2**20", "2**16"))
    before = held_bytes()
    notebook.fail("step()")
    assert held_bytes() == before + MIB // 4
    assert notebook.run("pass") == ""
    assert held_bytes() == before


@pytest.mark.parametrize(
    "code",
    [
        "def f():\n    try:\n        step()\n    except Exception as error:\n        me = error; raise",
        "def f():\n    me = [eight()]; me.append(me); step()",
    ],
)
def test_what_lies_in_a_cycle_goes_too(failing, code):
    failing.run(code)
    before = held_bytes()
    gc.disable()
    try:
        failing.fail("f()")
        failing.run("pass")
        assert held_bytes() == before
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "cell",
    [
        "def f():\n    batch = eight(); raise MemoryError\nf()",
        "def f():\n    batch = eight(); raise RuntimeError('CUDA error: out of memory')\nf()",
        "def f():\n    batch = eight(); raise torch.OutOfMemoryError('of another kind')\nf()",
        "def f():\n    batch = eight(); get_ipython().run_line_magic('load_model', 'big lambda: build(100)')\nf()",
        "try:\n    step()\nexcept Exception as error:\n    raise ValueError('no') from error",
        "try:\n    step()\nexcept Exception:\n    1 / 0",
        "try:\n    step()\nexcept Exception as error:\n    raise ExceptionGroup('two', [KeyError(), error])",
        "async def f():\n    return step()\nawait f()",
    ],
)
def test_out_of_memory_is_known_in_every_form(failing, cell):
    before = held_bytes()
    failing.fail(cell)
    assert held_bytes() == before + 8 * MIB
    failing.run("pass")
    assert held_bytes() == before


# ---------------------------------------------------------------------------------------------- what is left alone


def test_another_failure_belongs_to_debug(failing):
    before = held_bytes()
    failing.fail("def other():\n    batch = eight(); raise ValueError('no')\nother()")
    assert failing.run("pass") == ""
    assert held_bytes() == before + 8 * MIB
    assert sys.last_value.args == ("no",)


def test_a_failure_that_took_the_place_of_an_out_of_memory_is_left_alone_too(failing):
    failing.fail("step()")
    failing.fail("%tb\ndef f():\n    batch = eight(); raise ValueError('no')\nf()")
    assert failing.run("pass") == ""
    assert sys.last_value.args == ("no",)
    assert failing.shell.InteractiveTB.tb is not None


@pytest.mark.parametrize(
    "cell", ["%tb", "  %tb", "tb", "x = 1\n%tb", "%pdb off", "%%debug\npass", "import pdb; pdb.pm", "sys.last_value"]
)
def test_a_cell_that_looks_at_the_failure_still_finds_it(failing, monkeypatch, cell):
    monkeypatch.setattr("pdb.Pdb.run", lambda *args, **kwargs: None)  # %%debug would wait for its user
    failing.run("import sys")
    before = held_bytes()
    failing.fail("step()")
    failing.run(cell.replace("pdb.pm", "pdb.pm('not called') if 0 else None"))
    assert held_bytes() == before + 8 * MIB
    assert failing.run("pass").startswith("vram_magic: released 8.0 MiB")
    assert held_bytes() == before


def test_debug_finds_the_variables_of_the_failed_call(failing, monkeypatch):
    found = []

    def look(_debugger, _frame, failure):  # an exception, or in older IPythons its traceback
        frames = traceback.walk_tb(getattr(failure, "__traceback__", failure))
        found.extend(frame.f_locals.get("batch") is not None for frame, _ in frames)

    monkeypatch.setattr("IPython.core.debugger.Pdb.interaction", look)
    before = held_bytes()
    failing.fail("step()")
    failing.run("%debug")
    assert found[-1]
    failing.run("pass")
    assert held_bytes() == before  # although the debugger has asked for a copy of the variables


@pytest.mark.parametrize("name", ["tb = 1", "debugger = 1", "pdb_count = 1"])
def test_a_name_that_only_looks_like_a_magic_keeps_nothing(failing, name):
    before = held_bytes()
    failing.fail("step()")
    failing.run(name)
    assert held_bytes() == before


def test_it_stays_as_long_as_the_user_wants_it_to(failing):
    before = held_bytes()
    failing.run("%config VRAMMagics.keep_failed_frames = True")
    failing.fail("step()")
    failing.run("1;")
    failing.run("2;")
    assert held_bytes() == before + 8 * MIB
    failing.run("%config VRAMMagics.keep_failed_frames = False")
    failing.run("3;")
    assert held_bytes() == before


def test_the_wish_to_keep_it_can_stand_in_the_configuration(bare_notebook):
    bare_notebook.shell.config.VRAMMagics.keep_failed_frames = True
    bare_notebook.run("%load_ext vram_magic")
    assert bare_notebook.shell.magics_manager.registry["VRAMMagics"].keep_failed_frames


def test_the_notebooks_own_variables_and_results_stay(failing):
    failing.run("x = torch.ones(2**18, device=DEVICE); kept = []")
    failing.run("x + 1")
    number = max(failing["Out"])
    names = set(failing.shell.user_ns)
    failing.fail("inner = torch.ones(2**18, device=DEVICE)\nkept.append(inner)\nfor item in [x]:\n    step()")
    failing.run("pass")
    assert names | {"inner", "item"} <= set(failing.shell.user_ns)
    assert failing["Out"][number].sum() == 2**19
    assert failing["kept"][0] is failing["inner"]
    assert failing["item"] is failing["x"]


def test_an_exception_that_the_user_keeps_loses_the_tensors_of_its_frames_only(failing):
    before = held_bytes()
    failing.fail("try:\n    step()\nexcept Exception as error:\n    mine = error\n    raise")
    failing.run("pass")
    assert held_bytes() == before
    assert "Not enough memory" in str(failing["mine"])
    assert failing["mine"].__traceback__ is not None


def test_a_generator_that_caught_the_failure_can_go_on(failing):
    failing.run(
        "def stream():\n    mine = torch.ones(4, device=DEVICE)\n"
        "    try:\n        step()\n    except Exception as error:\n        yield error\n    yield mine\n"
        "stream = stream()"
    )
    failing.fail("raise next(stream)")
    failing.run("rest = list(stream)")
    assert failing["rest"][0].tolist() == [1, 1, 1, 1]


def test_a_cell_within_a_cell_does_not_empty_the_frames_that_still_run(failing):
    failing.run(
        "def outer():\n    mine = torch.ones(4, device=DEVICE)\n    get_ipython().run_cell('step()')\n"
        "    get_ipython().run_cell('pass')\n    return mine"
    )
    before = held_bytes()
    failing.run("result = outer()")
    assert failing["result"].tolist() == [1, 1, 1, 1]
    assert held_bytes() - before < MIB


def test_without_a_manager_nothing_happens(bare_notebook):
    bare_notebook.run("%load_ext vram_magic")
    bare_notebook.fail("def f():\n    big = bytearray(10)\n    raise MemoryError\nf()")
    assert bare_notebook.run("pass") == ""
    assert isinstance(sys.last_value, MemoryError)


def test_trouble_while_sweeping_reaches_no_cell(failing, monkeypatch):
    failing.fail("step()")
    monkeypatch.setattr("vram_magic.notebook.debris.let_go", lambda shell: 1 / 0)
    assert failing.run("1;") == ""


def test_a_cell_after_an_ordinary_one_is_not_searched(failing, monkeypatch):
    swept = []
    monkeypatch.setattr("vram_magic.notebook.debris.Debris.sweep", lambda *args: swept.append(args))
    failing.run("pass")
    failing.run("pass")
    assert not swept
    failing.fail("step()")
    failing.run("pass")
    assert swept


# ------------------------------------------------------------------------------------------------ in a real kernel


@pytest.mark.cpu_only("kernel")
def test_in_a_kernel_the_memory_is_back_without_a_restart():
    manager, client = start_new_kernel(180, kernel_name="python3")
    try:
        first = "%load_ext vram_magic\n%vram budget 64MiB\nimport torch; DEVICE = 'cpu'\n"
        assert shown_by(client, first + STEP)[1] == "ok"
        shown, status = shown_by(client, "step()")
        assert status == "error"
        assert "released" not in shown
        for _ in range(2):
            assert shown_by(client, "step()")[1] == "error"
        shown, status = shown_by(client, "x = torch.empty(60 * 2**18)")
        assert (shown, status) == ("vram_magic: released 8.0 MiB that the failed cell still held\n", "ok")
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def shown_by(client, cell):
    """What the cell prints, and how it ended."""
    texts = []
    reply = client.execute_interactive(
        cell, timeout=120, output_hook=lambda message: texts.append(message["content"].get("text", ""))
    )
    return "".join(texts), reply["content"]["status"]


def test_what_earlier_failures_left_in_cycles_goes_after_any_failed_cell_and_nothing_is_said(notebook):
    notebook.run("def outer():\n    big = torch.zeros(2 << 20, dtype=torch.uint8, device=DEVICE); raise KeyError('x')")
    before = vm.manager().used_bytes
    for _ in range(4):
        assert "KeyError" in notebook.fail("outer()")
    assert notebook.run("'next';") == ""
    assert vm.manager().used_bytes - before == 2 * MIB  # the last one's, which %debug can look at


@pytest.mark.parametrize(
    "cell",
    [
        "import ipdb; ipdb.pm()", "from pdb import pm; pm()", "import traceback; traceback.print_last()",
        "%time %debug", "get_ipython().run_line_magic('debug', '')", "get_ipython().debugger(force=True)", "%debug",
        "  %tb", "%%debug",
    ],
)  # fmt: skip
def test_a_cell_that_looks_at_the_failure_is_known(cell):
    assert debris._LOOKS_AT_FAILURE.search(cell)


@pytest.mark.parametrize("cell", ["print(1)", "debug = 1", "logger.debug('x')", "table(x)", "x.pm", "spm(3)"])
def test_other_cells_are_not_taken_for_one(cell):
    assert not debris._LOOKS_AT_FAILURE.search(cell)
