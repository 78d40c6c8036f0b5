"""The magics, through a real shell.

Without these, a magic may keep the model that it loaded alive, take an expression for a path, touch the first model
before it finds that the second name is wrong, or fail without failing its cell.
"""

import gc
import weakref

import pytest
from place import DEVICE
from safetensors.torch import save_file

import vram_magic as vm
from vram_magic.notebook import progress
from vram_magic.notebook.arguments import Arguments, UsageError
from vram_magic.notebook.completer import complete

MIB = 2**20

# ---------------------------------------------------------------------------------------------------- %load_model


def test_load_model_binds_the_very_object_and_returns_its_handle(notebook):
    notebook.run("h = %load_model tiny build")
    assert notebook["tiny"] is notebook["h"].model is vm.manager()["tiny"].model


def test_a_bare_load_model_shows_one_line(notebook):
    assert notebook.run("%load_model tiny build").strip().endswith("<tiny: device, 4.0 MiB, tier llm>")


def test_del_frees_the_model_at_once_though_the_handle_is_in_out(notebook):
    notebook.run("%load_model tiny build")
    model, before = weakref.ref(notebook["tiny"]), vm.manager().used_bytes
    notebook.run("del tiny")
    assert model() is None
    assert before - vm.manager().used_bytes == 4 * MIB
    assert "tiny" not in vm.manager()


def test_an_object_that_lives_in_the_notebook_is_taken_as_it_is(notebook):
    notebook.run("net = build()\n%load_model tiny net")
    assert notebook["tiny"] is notebook["net"]


def test_the_same_name_and_source_again_is_no_load_but_binds_again(notebook):
    notebook.run("%load_model tiny build")
    notebook.run("kept = tiny; del tiny")
    notebook.run("%load_model tiny build")
    assert notebook["tiny"] is notebook["kept"]


def test_another_source_replaces_the_model(notebook):
    notebook.run("%load_model tiny build")
    notebook.run("%load_model tiny lambda: build(2)")
    assert vm.manager()["tiny"].total_bytes == 2 * MIB
    assert list(vm.manager().models) == ["tiny"]


@pytest.mark.parametrize(
    "line",
    [
        "tiny build --pin --residency host --priority 7",
        "--pin --residency=host tiny --priority 7 build",
        "tiny lambda: build(2 + 2) --pin --residency host --priority=7",
        "--priority 7 --residency 'host' --pin tiny build(layers=4);",
        "tiny [build(), None][0] --pin --residency host --priority 7  # a comment --lazy",
        "$name build --pin --residency {'host'} --priority {3 + 4}",
    ],
)
def test_options_stand_before_behind_and_between(notebook, line):
    notebook.run("name = 'tiny'")
    handle = notebook.shell.run_line_magic("load_model", line)
    assert (handle.name, handle.pinned, handle.residency, handle.priority) == ("tiny", True, "host", 7)
    assert handle.state == "device"


def test_the_default_tier_is_the_name_if_it_is_one(notebook):
    notebook.run("%load_model asr build\n%load_model other build\n%load_model third build --tier tts")
    assert {name: h.tier for name, h in vm.manager().models.items()} == {"asr": "asr", "other": "llm", "third": "tts"}


def test_a_lazy_model_is_loaded_at_its_first_use(notebook, weights):
    notebook.run(f"%load_model tiny {weights} --into build --lazy")
    assert notebook.run("tiny(torch.ones(1, 512)).shape").endswith("torch.Size([1, 512])\n")


@pytest.fixture
def weights(notebook, tmp_path, monkeypatch):
    """A file of the weights of `build(4)`, in a folder that is home and has a blank in its name."""
    home = tmp_path / "my home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home)
    notebook.run("net = build()")
    save_file(notebook["net"].state_dict(), home / "net.safetensors")
    notebook.run(f"path = {str(home / 'net.safetensors')!r}")
    return "net.safetensors"


@pytest.mark.parametrize("source", ["net.safetensors", "~/net.safetensors", "'{path}'", "path", "$path", "{path}"])
@pytest.mark.parametrize("into", ["build", "build(4)", "lambda: build(4)"])
def test_a_weight_file_is_named_in_every_way_and_read_into_a_module(notebook, weights, source, into):
    source = source.replace("'{path}'", repr(notebook["path"]))
    notebook.run(f"%load_model tiny {source} --into {into}")
    assert notebook["torch"].equal(notebook["tiny"][3].weight, notebook["net"][3].weight)


def test_a_name_of_the_notebook_wins_over_a_folder_of_that_name(notebook, tmp_path, monkeypatch):
    (tmp_path / "build").mkdir()
    monkeypatch.chdir(tmp_path)
    notebook.run("%load_model tiny build")
    assert "SourceError" in notebook.fail("%load_model tiny ./build")
    assert "SourceError" in notebook.fail("%load_model tiny 'build'")


def test_errors_of_the_users_own_expression_show_as_they_are(notebook):
    assert "ZeroDivisionError: division by zero" in notebook.fail("%load_model tiny lambda: 1 / 0")
    assert "NameError: name 'bild' is not defined" in notebook.fail("%load_model tiny bild()")
    assert "tiny" not in notebook.shell.user_ns


def test_what_is_no_expression_over_known_names_is_looked_for_as_a_path_or_hub_id(notebook, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "SourceError: No model can be made of no/such/folder." in notebook.fail("%load_model tiny no/such/folder")
    assert "SourceError" in notebook.fail("%load_model tiny 17")


def test_a_source_that_is_nowhere_says_where_it_was_looked_for_and_what_is_alike(notebook, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "llm").mkdir(parents=True)
    shown = notebook.fail("%load_model tiny Biuld").splitlines()
    nowhere = f"'Biuld' is no variable of this notebook and no file or folder here ({tmp_path}). The hub gave nothing: "
    assert shown[2].startswith(nowhere)
    assert shown[3] == "Did you mean the variable 'build'? %load_model NAME build"
    shown = notebook.fail("%load_model tiny models/lmm").splitlines()
    assert shown[2].startswith(f"'models/lmm' is no file or folder here ({tmp_path}). The hub gave nothing: ")
    assert shown[3] == "Did you mean 'models/llm'? %load_model NAME models/llm"
    assert "no variable" not in notebook.fail("%load_model tiny 'Biuld'")  # in quotes it is a path or an id


def test_a_download_is_suggested_only_for_what_looks_like_a_hub_id(notebook, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    assert "!hf download org/name " in notebook.fail("%load_model tiny org/name")
    for source in ("models/name", "qwertz", "'two words'"):
        assert "hf download" not in notebook.fail(f"%load_model tiny {source}")


def test_a_mistyped_word_is_told_with_the_one_that_was_meant(notebook):
    notebook.run("%load_model tiny build")
    assert "did you mean %vram evict?" in notebook.fail("%vram evcit tiny")
    assert "did you mean --pin?" in notebook.fail("%load_model tiny build --pni")
    assert "did you mean --free?" in notebook.fail("%vram doctor --fre")
    assert "Did you mean 'tiny'?" in notebook.fail("%vram why Tinny")
    for line in ("%vram frobnicate", "%vram doctor --qqq", "%vram why nobody"):
        assert "id you mean" not in notebook.fail(line)


@pytest.mark.parametrize(
    "line", ["%load_model tiny build --tier king", "%vram tier a king", "%vram plan 1MiB --tier king"]
)
def test_an_unknown_tier_says_that_a_number_will_do_and_how_to_add_one(notebook, line):
    shown = notebook.fail(line)
    assert "a tier is one of llm, tts, asr, or a whole number, not 'king'" in shown
    remedy = next(text for text in shown.splitlines() if text.startswith("add it with: ")).removeprefix("add it with: ")
    notebook.run(remedy.replace("RANK", "4"))
    notebook.run("%load_model a build\n" + line)


def test_what_is_no_dtype_is_a_usage_error(notebook):
    result = notebook.shell.run_cell("%load_model tiny build --dtype float17")
    assert type(result.error_in_exec) is UsageError
    assert "float17 is no floating-point dtype of torch, such as bfloat16" in str(result.error_in_exec)
    notebook.run("%load_model tiny build --dtype fp16")
    assert notebook["tiny"][0].weight.dtype == notebook["torch"].float16


def test_a_failed_load_binds_nothing_and_is_a_few_lines(notebook):
    shown = notebook.fail("%load_model tiny lambda: build(100)")
    assert shown.startswith("VRAMOutOfMemoryError: ")
    assert len(shown.strip().splitlines()) <= 5
    assert "tiny" not in notebook.shell.user_ns
    assert "tiny" not in vm.manager()


def test_another_device_than_the_managers_is_refused(notebook):
    if DEVICE == "cpu":
        assert "The device 'cuda' cannot be used" in notebook.fail("%load_model tiny build --device cuda")
    else:
        assert "chosen when its first model is loaded" in notebook.fail("%load_model tiny build --device cpu")
    notebook.run(f"%load_model tiny build --device {DEVICE}")


# ---------------------------------------------------------------------------------------------------------- %vram


def test_the_report_names_models_and_other_tensors(notebook):
    notebook.run("%load_model tiny build")
    notebook.run("x = torch.ones(2 * 2**20 // 4, device=DEVICE)")
    shown = notebook.run("%vram")
    assert f"{vm.manager().device}: 6.0 MiB of 64.0 MiB used, 58.0 MiB free" in shown
    assert "tiny" in shown
    assert "other tensors: 2.0 MiB" in shown


def test_a_size_may_be_two_words(notebook):
    assert notebook.run("%vram budget 32 MiB") == "budget 32.0 MiB\n"
    assert vm.manager().budget_bytes == 32 * MIB
    assert notebook.run("%vram budget auto").startswith("budget ")


def test_a_lower_budget_says_what_it_freed(notebook):
    notebook.run("%load_model tiny build")
    shown = notebook.run("%vram budget 2MiB")
    assert shown.splitlines()[0] == "budget 2.0 MiB, freed 4.0 MiB"


def test_evict_and_load_say_what_moved(notebook):
    notebook.run("%load_model a build\n%load_model b build")
    assert notebook.run("%vram evict a b;") == "freed 8.0 MiB\n"
    assert notebook.run("%vram load a b") == "a: 4.0 MiB on the device\nb: 4.0 MiB on the device\n"


def test_evict_says_what_stayed(notebook):
    notebook.run("%load_model a build\nalias = a[0].weight.data")
    assert "a keeps 4.0 MiB on the device; see: %vram why a" in notebook.run("%vram evict a")


def test_evict_all_spares_what_is_pinned_and_says_so(notebook):
    notebook.run("%load_model a build\n%load_model b build --pin")
    shown = notebook.run("%vram evict --all")
    assert shown.splitlines() == ["freed 4.0 MiB", "b stays: pinned"]
    shown = notebook.run("%vram evict --all")
    assert shown.splitlines() == ["freed 0 B", "a was out already", "b stays: pinned"]
    assert notebook.run("%vram evict a").splitlines() == ["freed 0 B", "a was out already"]
    assert "ModelInUseError: 'b' stays" in notebook.fail("%vram evict b")


def test_evict_all_spares_what_is_in_use_and_says_so(notebook):
    notebook.run("%load_model a build")
    with vm.manager()["a"].lease():
        assert notebook.run("%vram evict --all").splitlines() == ["freed 0 B", "a stays: in use by a call in progress"]


def test_a_budget_that_is_too_low_tells_the_lowest_one_and_that_one_is_taken(notebook):
    gc.collect()  # garbage of other tests would be told, too
    notebook.run("%load_model a build\n%load_model b build(9) --pin")
    shown = notebook.fail("%vram budget 3")
    what, numbers, cause, command = shown.splitlines()
    assert what == "VRAMOutOfMemoryError: A budget of 3 B is too low. 3 means 3 bytes."
    assert numbers == "9.0 MiB cannot leave; 64.0 MiB is the budget now, 51.0 MiB of it are free."
    assert cause.startswith("Held by: b 9.0 MiB (pinned), a 4.0 MiB")
    assert command.startswith("Set at least: %vram budget ")
    assert command.endswith("MiB   or let it leave with: %vram unpin b")
    assert vm.manager()["a"].state == "device"
    assert "means" not in notebook.fail("%vram budget 3KiB")
    assert "means" not in notebook.fail("%vram budget 2000000")
    assert ", freed 4.0 MiB\n" in notebook.run(f"%vram budget {command.split()[5]}")


def test_what_a_live_graph_keeps_is_told_with_its_remedy(notebook):
    notebook.run("%load_model a build\ny = a(torch.ones(1, 512, device=DEVICE))\n%vram evict a")
    remedy = "an output that is still alive holds the graph: del it, or compute under torch.no_grad()"
    assert remedy in notebook.run("%vram why a")
    assert remedy in notebook.fail("%vram budget 1MiB").splitlines()[-1]
    assert remedy in notebook.fail("t = torch.empty(62 << 20, dtype=torch.uint8, device=DEVICE)").splitlines()[-1]
    notebook.run("del y\n%vram evict a")
    assert remedy not in notebook.run("%vram why a")


def test_the_doctor_is_named_where_other_tensors_hold_the_most(notebook):
    notebook.run("%load_model a build\nt = torch.empty(8 << 20, dtype=torch.uint8, device=DEVICE)")
    asks = "u = torch.empty({} << 20, dtype=torch.uint8, device=DEVICE)"
    assert "%vram doctor" in notebook.fail(asks.format(60)).splitlines()[-1]
    assert "%vram doctor" in notebook.fail(asks.format(99)).splitlines()[-1]
    notebook.run("del t")
    assert "%vram doctor" not in notebook.fail(asks.format(99))


def test_every_name_is_looked_up_before_the_first_model_is_touched(notebook):
    notebook.run("%load_model a build")
    shown = notebook.fail("%vram evict a nobody")
    assert shown.startswith("UnknownModelError: No model is called 'nobody'.")
    assert "Traceback" not in shown
    assert vm.manager()["a"].state == "device"


def test_pin_unpin_tier_and_residency_reach_the_model(notebook):
    notebook.run("%load_model a build")
    notebook.run("%vram pin a\n%vram tier a asr\n%vram residency a host")
    handle = vm.manager()["a"]
    assert (handle.pinned, handle.tier, handle.residency) == (True, "asr", "host")
    notebook.run("%vram unpin a\n%vram tier a 5")
    assert (handle.pinned, handle.priority) == (False, 5)


def test_a_tier_of_the_users_own_is_known(notebook):
    notebook.run("import vram_magic; vram_magic.manager().tiers['reranker'] = 4")
    notebook.run("%load_model a build --tier reranker")
    assert vm.manager()["a"].priority == 4


def test_forget_leaves_the_variable_usable(notebook):
    notebook.run("%load_model a build\n%vram evict a\n%vram forget a")
    assert "a" not in vm.manager()
    notebook.run("a(torch.ones(1, 512, device=a[0].weight.device))")  # an accelerator's stays where it was: on the CPU


def test_plan_moves_nothing(notebook):
    notebook.run("%load_model a build")
    assert "would free 4.0 MiB" in notebook.run("%vram plan 62 MiB --tier llm")
    assert vm.manager()["a"].state == "device"


def test_log_shows_the_last_decisions(notebook):
    assert notebook.run("%vram log") == "nothing had to be decided yet\n"
    notebook.run("%load_model a build\n%vram evict a\n%vram load a\n%vram evict a")
    log = notebook.run("%vram log")
    assert log.count("evict a: ") == 2
    assert notebook.run("%vram log -n 1") == log  # all in one cell
    for count in (0, -3):
        assert "-n takes a whole number from 1 on" in notebook.fail(f"%vram log -n {count}")


def test_why_tells_of_one_model_whatever_its_name_is(notebook):
    notebook.run("net = build()")
    vm.manager().register("two words; <b>", notebook["net"])
    assert notebook.run("%vram why 'two words; <b>'").startswith("two words; <b> is on the device")


def test_help_is_one_screen_and_names_every_command(notebook):
    lines = notebook.run("%vram help").splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 120
    assert notebook.run("%vram --help").splitlines() == lines
    assert "usage: %vram evict NAME..." in notebook.run("%vram evict --help")
    assert "usage: %load_model NAME SOURCE" in notebook.run("%load_model --help")


@pytest.mark.parametrize(
    "line",
    [
        "load_model",
        "load_model tiny",
        "load_model 2tiny build",
        "load_model class build",
        "load_model tiny build --frobnicate",
        "load_model tiny build --tier",
        "load_model tiny build --tier --pin",
        "load_model tiny build --tier nope",
        "load_model tiny build --tier llm --tier tts",
        "load_model tiny build --tier llm --priority 1",
        "load_model tiny build --priority high",
        "load_model tiny build --residency moon",
        "load_model tiny build( --pin",
        "load_model tiny 'build --pin",
        "vram nonsense",
        "vram doctor tiny",
        "vram doctor --everything",
        "vram budget",
        "vram budget lots",
        "vram budget -1GiB",
        "vram load",
        "vram evict",
        "vram evict --all tiny",
        "vram evict tiny --everything",
        "vram tier tiny",
        "vram tier tiny nope",
        "vram residency tiny moon",
        "vram plan",
        "vram plan 1GiB --tier nope",
        "vram log -n many",
        "vram why",
        "vram why tiny tiny",
        "vram panel open",
    ],
)
def test_wrong_arguments_are_a_usage_error_of_the_exact_class(notebook, line):
    notebook.run("%load_model tiny build")
    result = notebook.shell.run_cell(f"%{line}")
    assert type(result.error_in_exec) is UsageError
    assert vm.manager()["tiny"].state == "device"


# ------------------------------------------------------------------------------------------------------ the parts


@pytest.mark.parametrize(
    ("line", "chunks"),
    [
        ("a  b", ["a", "b"]),
        ("f(a, [1, 2]) b;", ["f(a, [1, 2])", "b"]),
        ("'my folder/x' b", ["'my folder/x'", "b"]),
        ('f(\'a (b\', "c\\" d") e', ['f(\'a (b\', "c\\" d")', "e"]),
        ("a#b # c", ["a#b"]),
        ("", []),
    ],
)
def test_a_line_is_cut_at_blanks_outside_quotes_and_brackets(line, chunks):
    assert Arguments(line, "").rest() == chunks


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("%vram pa", ["panel"]),
        ("  x = %vram lo", ["load", "log"]),
        ("vram ev", ["evict"]),
        ("%vram evict ti", ["tiny"]),
        ("%vram evict tiny ", []),
        ("%vram evict -", ["--all"]),
        ("%vram tier tiny ", ["asr", "llm", "tts"]),
        ("%vram residency tiny d", ["device", "disk"]),
        ("%vram plan 1GiB --tier t", ["tts"]),
        ("%load_model a b --re", ["--residency"]),
        ("%load_model a b --residency h", ["host"]),
        ("%load_model a ", []),
        ("vram = 3", []),
        ("print(", []),
    ],
)
def test_completion_knows_commands_models_tiers_and_options(notebook, text, expected):
    notebook.run("%load_model tiny build")
    assert complete(text) == expected


def test_completion_reaches_the_shell(notebook):
    _, found = notebook.shell.complete("pan", "%vram pan", 9)
    assert found == ["panel"]


def test_a_short_load_prints_nothing_and_a_long_one_shows_a_bar(notebook, monkeypatch):
    shown = []

    class Bar:
        total, n = None, 0

        def reset(self, total):
            self.total = total

        def update(self, more):
            self.n += more

        def close(self):
            shown.append((self.n, self.total))

    monkeypatch.setattr(progress, "_bar", lambda names: Bar())
    assert progress._PATIENCE_S > 1
    monkeypatch.setattr(progress, "_PATIENCE_S", 60)
    notebook.run("%load_model tiny build")
    assert not shown
    monkeypatch.setattr(progress, "_PATIENCE_S", 0.01)
    monkeypatch.setattr(progress, "_PERIOD_S", 0.01)
    notebook.run("import time\ndef slowly():\n    net = build(); time.sleep(0.3); return net")
    notebook.run("%load_model slow slowly")
    assert len(shown) == 1


def test_a_bar_that_cannot_be_shown_does_not_harm_the_load(notebook, monkeypatch):
    monkeypatch.setattr(progress, "_PATIENCE_S", 0)
    monkeypatch.setattr(progress, "_bar", lambda names: 1 / 0)
    notebook.run("%load_model tiny build")
