"""`%vram doctor`: whose the memory is that no model owns, whether the sums are right, and whether the commands help.

Without this the report says "other tensors: 9 GiB" and nobody can tell what to delete; or a command is named that frees
nothing, bytes are counted twice, or the doctor itself keeps alive what it looked at, or runs somebody's code.
"""

import gc
import weakref

import pytest
import torch
from place import DEVICE, footprint

import vram_magic as vm
from vram_magic.devices.base import Outside
from vram_magic.notebook import doctor
from vram_magic.notebook.walk import Walk

MIB = 2**20


@pytest.fixture(autouse=True)
def without_the_garbage_of_other_tests():
    gc.collect()


def lines_of(shown):
    """(size, holder, command) of each line."""
    rows = [line.strip().split("  ") for line in shown.splitlines() if line.startswith("  ")]
    return [tuple(part.strip() for part in row if part) for row in rows]


def findings(notebook):
    """Size and command by holder, as examined now; small change of other tests' modules is left out."""
    return {
        finding.holder: (finding.size_bytes, finding.command)
        for finding in doctor.examine(notebook.shell, vm.manager()).findings
        if finding.size_bytes >= MIB // 2
    }


def freed_by(notebook, command):
    before = vm.manager().used_bytes
    notebook.run(command)
    return before - vm.manager().used_bytes


# ---------------------------------------------------------------------------------------------------- each holder


def test_a_name_is_told_with_its_bytes_and_del_frees_them(notebook):
    notebook.run("x = torch.ones(2**18, device=DEVICE)")
    assert findings(notebook) == {"x": (MIB, "del x")}
    assert freed_by(notebook, "del x") == MIB


def test_names_of_one_storage_are_one_line(notebook):
    notebook.run("x = torch.ones(2**18, device=DEVICE); y = x[5:]; z = [x.view(2, -1)]")
    assert findings(notebook) == {"x, y, z": (MIB, "del x, y, z")}
    assert freed_by(notebook, "del x, y, z") == MIB


@pytest.mark.parametrize(
    "expression",
    [
        "[{'a': ({torch.ones(2**18, device=DEVICE)},)}]",
        "type('Thing', (), {})()",
        "type('Slotted', (), {'__slots__': ['t']})()",
        "__import__('collections').OrderedDict(t=torch.ones(2**18, device=DEVICE))",
        "(lambda t=torch.ones(2**18, device=DEVICE): t)",
        "(lambda t: lambda: t)(torch.ones(2**18, device=DEVICE))",
        "torch.ones(2**18, device=DEVICE).numel",
        "__import__('functools').partial(print, torch.ones(2**18, device=DEVICE))",
        "iter([torch.ones(2**18, device=DEVICE)])",
    ],
)
def test_what_an_object_leads_to_is_the_names(notebook, expression):
    notebook.run(f"thing = {expression}")
    if type(notebook["thing"]).__name__ in ("Thing", "Slotted"):
        notebook.run("thing.t = torch.ones(2**18, device=DEVICE)")
    assert findings(notebook) == {"thing": (MIB, "del thing")}
    assert freed_by(notebook, "del thing") == MIB


def test_a_module_may_be_deleted_or_managed(notebook):
    notebook.run("net = build(2)")
    assert findings(notebook) == {"net": (2 * MIB, "del net, or manage it: %load_model net net")}
    notebook.run("%load_model net net")
    assert findings(notebook) == {}


def test_what_a_managed_model_keeps_besides_its_weights_is_told(notebook):
    notebook.run("%load_model llm build\nllm.cache = [torch.ones(2**18, device=DEVICE)]")
    assert findings(notebook) == {"llm, besides its weights": (MIB, "del llm")}


def test_gradients_are_told_apart_and_zero_grad_frees_them(notebook):
    notebook.run("net = build(2); p = torch.ones(2**18, device=DEVICE, requires_grad=True)")
    notebook.run("%load_model llm build")
    notebook.run("for m in (net, llm):\n    m(torch.ones(1, 512, device=DEVICE)).sum().backward()")
    notebook.run("p.sum().backward(); del m")
    found = findings(notebook)
    assert found["gradients of net"] == (2 * MIB, "net.zero_grad()")
    assert found["gradients of llm"] == (4 * MIB, "llm.zero_grad()")
    assert found["gradients of p"] == (MIB, "p.grad = None")
    assert freed_by(notebook, "net.zero_grad()\nllm.zero_grad()\np.grad = None") == 7 * MIB


def test_gradients_of_a_model_without_a_name_are_still_its(notebook):
    notebook.run("%load_model llm build\nimport sys, vram_magic\nsys.kept, llm.weight_of = llm, None")
    try:
        notebook.run("llm(torch.ones(1, 512, device=DEVICE)).sum().backward(); del llm")
        command = "vram_magic.manager()['llm'].model.zero_grad()"
        assert findings(notebook) == {"gradients of llm": (4 * MIB, command)}
        assert freed_by(notebook, command) == 4 * MIB
    finally:
        notebook.run("del sys.kept")


def test_the_state_of_an_optimizer_is_under_its_name(notebook):
    notebook.run("%load_model llm build\nopt = torch.optim.Adam(llm.parameters())")
    notebook.run("llm(torch.ones(1, 512, device=DEVICE)).sum().backward(); opt.step(); opt.zero_grad()")
    ((holder, (size, command)),) = findings(notebook).items()
    assert (holder, command) == ("optimizer opt", "del opt")
    assert 8 * MIB <= size < 8 * MIB + footprint(*[4] * 8)  # it counts its steps, in tensors too
    assert freed_by(notebook, "del opt") == size


def test_a_graph_is_told_as_memory_inside_cpp(notebook):
    notebook.run("net = build(2); x = torch.ones(1024, 512, device=DEVICE, requires_grad=True)")
    notebook.run("loss = net(x).relu().exp().sum()")
    found = findings(notebook)
    assert not any("no name" in holder for holder in found)  # although Python has seen what the graph holds
    (holder,) = [holder for holder in found if "inside C++" in holder]
    size, command = found[holder]
    assert size >= 2 * MIB
    assert "del the output" in command
    assert freed_by(notebook, "del loss") >= size - MIB // 2


def test_a_tensor_that_no_name_leads_to_is_told_by_its_looks(notebook, monkeypatch):
    monkeypatch.setattr(doctor, "forgotten", torch.ones(512, 1024, device=DEVICE), raising=False)
    ((what, (size, command)),) = findings(notebook).items()
    assert "float32 512x1024, that no name leads to" in what  # with small change of other tests' modules
    assert 2 * MIB <= size < 2 * MIB + MIB // 2
    assert command == "%vram doctor --free, if only cycles hold it"


def test_gradients_of_what_no_name_leads_to_are_told_too(notebook, monkeypatch):
    forgotten = torch.ones(2**18, device=DEVICE, requires_grad=True)
    forgotten.sum().backward()
    monkeypatch.setattr(doctor, "forgotten", forgotten, raising=False)
    assert findings(notebook)["gradients of tensors that no name leads to"] == (MIB, "")


def test_the_last_results_are_told_and_the_command_frees_them(notebook):
    notebook.run("torch.ones(2**18, device=DEVICE)")
    number = max(notebook["Out"])
    assert findings(notebook) == {f"Out[{number}]": (MIB, f"%xdel _{number}")}
    assert freed_by(notebook, f"%xdel _{number}") == MIB


def test_an_older_result_is_freed_in_the_same_way(notebook):
    notebook.run("torch.ones(2**18, device=DEVICE)")
    number = max(notebook["Out"])
    for _ in range(4):
        notebook.run("1 + 1")
    assert freed_by(notebook, findings(notebook)[f"Out[{number}]"][1]) == MIB


def test_a_result_that_has_a_name_too_is_one_line_with_one_command(notebook):
    notebook.run("x = torch.ones(2**18, device=DEVICE); y = x")
    notebook.run("x")
    number = max(notebook["Out"])
    ((holder, (size, command)),) = findings(notebook).items()
    assert (holder, size, command) == (f"Out[{number}], x, y", MIB, "%xdel x")
    assert freed_by(notebook, command) == MIB
    assert not {"x", "y"} & notebook.shell.user_ns.keys()


def test_what_reset_leaves_behind_is_told_and_freed(notebook):
    notebook.run("torch.ones(2**18, device=DEVICE)")
    notebook.run("%reset -f out")
    ((holder, (size, command)),) = findings(notebook).items()
    assert (holder, size) == ("the last results (_)", MIB)
    assert freed_by(notebook, command) == MIB


def test_frames_of_the_last_failure_are_told_by_function_and_variable(notebook):
    notebook.run("x = torch.ones(2**18, device=DEVICE)")
    notebook.run("def step(given):\n    batch = [torch.ones(2**19, device=DEVICE)]\n    raise ValueError")
    notebook.fail("step(x)")
    assert findings(notebook) == {
        "the failed step(): batch": (2 * MIB, "%vram doctor --free"),
        "the failed step(): given, x": (MIB, "%vram doctor --free and del x"),
    }
    assert freed_by(notebook, "%vram doctor --free") == 2 * MIB
    assert findings(notebook) == {"x": (MIB, "del x")}


def test_a_failure_that_the_user_keeps_leads_to_its_frames(notebook):
    notebook.run(
        "def step():\n    batch = torch.ones(2**19, device=DEVICE)\n    raise ValueError\n"
        "try:\n    step()\nexcept ValueError as error:\n    mine = error"
    )
    assert findings(notebook) == {"mine": (2 * MIB, "del mine")}
    assert freed_by(notebook, "del mine") == 2 * MIB


# ------------------------------------------------------------------------------------------------------- the sums


def test_everything_together_is_what_the_device_has_in_use(notebook):
    gc.collect()
    before = doctor.examine(notebook.shell, vm.manager())
    assert before.explained_bytes - before.used_bytes < MIB  # what other tests' modules made before the manager
    notebook.run("%load_model llm build\n%load_model tts lambda: build(3)\n%vram evict tts")
    notebook.run("net = build(2); opt = torch.optim.Adam(net.parameters()); x = torch.ones(700, 512, device=DEVICE)")
    notebook.run("loss = net(llm(x)).relu().exp().sum(); loss.backward(retain_graph=True); opt.step()")
    notebook.run("x[3:]")
    notebook.run("shared = llm[0].weight.data[7:]")
    notebook.fail("def f(batch):\n    more = batch.exp(); raise ValueError\nf(x)")
    after = doctor.examine(notebook.shell, vm.manager())
    assert len(after.findings) >= 7
    assert after.managed_bytes == 4 * MIB
    assert after.used_bytes == vm.manager().used_bytes
    assert after.explained_bytes - after.used_bytes == before.explained_bytes - before.used_bytes
    kinds = " ".join(finding.holder for finding in after.findings)
    assert all(part in kinds for part in ("the failed f(): more", "Out[", "optimizer opt", "gradients of", "C++"))


def test_without_a_graph_python_finds_every_byte(notebook):
    notebook.run("%load_model llm build\nx = torch.ones(1000, device=DEVICE); y = [torch.ones(3, device=DEVICE)]")
    with torch.no_grad():
        notebook.run("z = llm(torch.ones(1, 512, device=DEVICE)).detach()")
    found = doctor.examine(notebook.shell, vm.manager())
    sizes = {finding.holder: finding.size_bytes for finding in found.findings}
    assert (sizes["x"], sizes["y"]) == (footprint(4000), footprint(12))
    assert sum(size for holder, size in sizes.items() if "C++" in holder) <= found.used_bytes - 4 * MIB
    assert found.managed_bytes == 4 * MIB


def test_weights_shared_by_two_models_count_once(notebook):
    notebook.run("%load_model a build\nb = nn.Sequential(a[0], *build(1))\n%load_model b b")
    assert doctor.examine(notebook.shell, vm.manager()).managed_bytes == 5 * MIB


def test_an_outside_engine_counts_with_its_declared_size(notebook):
    notebook.run(
        "import vram_magic\n"
        "class Engine:\n    async def load(self, name): pass\n    async def unload(self, name): pass\n"
        "h = await vram_magic.manager().load_model('engine', vram_gb=1 / 128, backend=Engine())"
    )
    found = doctor.examine(notebook.shell, vm.manager())
    assert found.managed_bytes == 8 * MIB
    assert findings(notebook) == {}


@pytest.mark.cpu_only("allocator")
def test_a_tensor_without_a_storage_counts_as_memory_inside_cpp(notebook):
    notebook.run("sparse = torch.ones(512, 512).to_sparse()")
    ((holder, (size, _)),) = findings(notebook).items()
    assert "inside C++" in holder
    assert size >= 5 * MIB  # a value and two coordinates each


@pytest.mark.cpu_only("allocator")
def test_memory_that_is_not_torchs_own_is_left_out(notebook, tmp_path):
    (tmp_path / "zeros").write_bytes(bytes(4 * MIB))
    notebook.run(f"path = {str(tmp_path / 'zeros')!r}")
    notebook.run("import numpy; a = torch.from_numpy(numpy.ones(2**20)); m = torch.from_file(path, size=2**20)")
    assert findings(notebook) == {}


# ------------------------------------------------------------------------------------------------------- the text


def test_the_report_is_sorted_lines_with_the_sum_at_the_end(notebook):
    notebook.run("%load_model llm build\n%vram doctor --free")
    notebook.run("b = torch.ones(2**18, device=DEVICE); a = torch.ones(2**18, device=DEVICE)")
    notebook.run("c = torch.ones(2**19, device=DEVICE)")
    shown = notebook.run("%vram doctor")
    rows = [row for row in lines_of(shown) if "MiB" in row[0] and "cache" not in row[1]]
    assert rows == [("2.0 MiB", "c", "del c"), ("1.0 MiB", "a", "del a"), ("1.0 MiB", "b", "del b")]
    assert shown.splitlines()[0] == f"{vm.manager().device}: memory that no managed model owns"
    assert shown.splitlines()[-1].startswith("managed models: 4.0 MiB, all: 8.0 MiB of 8.0 MiB used")
    assert shown == notebook.run("%vram doctor")
    assert "0x" not in shown


def test_nothing_is_one_plain_line():
    empty = doctor.Diagnosis("cpu", (), (), 4, 4)
    assert repr(empty) == "cpu: nothing but managed models holds memory"


def test_a_long_list_is_cut_and_still_sums_up():
    many = tuple(doctor.Finding(MIB, f"x{number:02}", f"del x{number:02}") for number in range(50))
    lines = repr(doctor.Diagnosis("cpu", many, (), 0, 50 * MIB)).splitlines()
    assert len(lines) == 23
    assert lines[-2].split("  ")[1:3] == ["30.0 MiB", "30 smaller ones"]
    assert lines[-1] == "managed models: 0 B, all: 50.0 MiB of 50.0 MiB used"


def test_what_is_older_than_the_manager_is_told():
    found = doctor.Diagnosis("cpu", (doctor.Finding(3 * MIB, "x", "del x"),), (), 0, MIB)
    assert repr(found).endswith("all: 3.0 MiB of 1.0 MiB used (2.0 MiB is older than the manager, and does not count)")


def test_names_are_shortened_and_odd_ones_have_a_command_that_works(notebook):
    notebook.run(f"{'n' * 90} = torch.ones(2**18, device=DEVICE)")
    notebook.run("globals()['two\\nwords'] = torch.ones(2**18, device=DEVICE)")
    found = findings(notebook)
    assert max(map(len, found)) <= 40
    for _, command in found.values():
        assert freed_by(notebook, command) == MIB


def test_other_processes_are_named_where_the_driver_tells(notebook, monkeypatch):
    outside = Outside(8 * MIB, MIB, 5 * MIB, ("python (pid 7) 5.0 MiB",))
    monkeypatch.setattr(vm.VRAMManager, "outside", lambda self, processes=False: outside)
    assert "5.0 MiB  other processes and the driver: python (pid 7) 5.0 MiB" in notebook.run("%vram doctor")


# ------------------------------------------------------------------------------------------------------- --free


def test_free_lets_go_of_frames_and_cycles_and_says_how_much(notebook):
    notebook.run("kept = torch.ones(2**18, device=DEVICE)")
    notebook.run("kept + 1")
    notebook.run("class Cyclic: pass\nimport gc; gc.disable()")
    notebook.fail("def f():\n    batch = torch.ones(2**19, device=DEVICE); raise ValueError\nf()")
    notebook.run("c = Cyclic(); c.c, c.t = c, torch.ones(2**18, device=DEVICE); del c")
    try:
        assert notebook.run("%vram doctor --free").startswith("freed 3.0 MiB")
    finally:
        gc.enable()
    assert notebook["kept"].sum() == 2**18
    assert notebook["Out"][max(notebook["Out"])].sum() == 2**19
    assert notebook.run("%vram doctor --free").startswith("freed 0 B")


@pytest.mark.simulation_only
def test_the_allocators_cache_is_told_and_returned(notebook):
    notebook.run("%vram doctor --free\nx = torch.ones(2**20, device=DEVICE); del x")
    cached = torch.accelerator.memory_reserved() - torch.accelerator.memory_allocated()
    assert cached >= 4 * MIB
    assert any(row[1:] == ("torch's cache", "%vram doctor --free") for row in lines_of(notebook.run("%vram doctor")))
    assert notebook.run("%vram doctor --free").endswith("of torch's cache returned to the device\n")
    assert torch.accelerator.memory_reserved() - torch.accelerator.memory_allocated() <= cached - 4 * MIB


# ------------------------------------------------------------------------------------------------- a good guest


def test_looking_keeps_nothing_alive(notebook):
    notebook.run("x = torch.ones(2**18, device=DEVICE); net = build()")
    notebook.fail("def f():\n    batch = torch.ones(2**18, device=DEVICE); raise ValueError\nf()")
    gc.disable()
    try:
        notebook.run("%vram doctor")
        found = doctor.examine(notebook.shell, vm.manager())
        x, net = weakref.ref(notebook["x"]), weakref.ref(notebook["net"])
        assert freed_by(notebook, "del x, net") == 5 * MIB
        assert x() is net() is None
        assert freed_by(notebook, "%vram doctor --free") == MIB
        assert found.findings
    finally:
        gc.enable()


HOSTILE = """
class Meta(type):
    def __getattribute__(cls, name): raise SystemError(name)
    def __hash__(cls): raise SystemError
    def __instancecheck__(cls, other): raise SystemError
class Hostile(metaclass=Meta):
    def __init__(self, t): object.__setattr__(self, "t", t)
    def __getattribute__(self, name): raise SystemError(name)
    def __eq__(self, other): raise SystemError
    def __hash__(self): raise SystemError
    def __len__(self): raise SystemError
    def __iter__(self): raise SystemError
    def __bool__(self): raise SystemError
    def __repr__(self): raise SystemError
    def __del__(self): pass
class Liar:
    __class__ = property(lambda self: torch.Tensor)
    grad = untyped_storage = property(lambda self: 1 / 0)
class List(list):
    def __len__(self): raise SystemError
    def __iter__(self): raise SystemError
class Sub(torch.Tensor):
    grad = device = property(lambda self: 1 / 0)
    def __torch_function__(cls, *args, **kwargs): raise SystemError
"""


def test_objects_that_raise_whenever_they_are_touched_are_walked_all_the_same(notebook):
    notebook.run(HOSTILE)
    notebook.run("hostile = Hostile(torch.ones(2**18, device=DEVICE)); liar = Liar()")
    notebook.run("liar.t = List([torch.ones(2**19, device=DEVICE)])")
    notebook.run("sub = torch.Tensor._make_subclass(Sub, torch.ones(2**20, device=DEVICE))")
    notebook.run(
        "import weakref; proxy = weakref.proxy(liar); dead = weakref.proxy(List()); odd = {1: hostile, 2: dead}"
    )
    assert {holder: size for holder, (size, _) in findings(notebook).items()} == {
        "hostile, odd": MIB,
        "liar": 2 * MIB,
        "sub": 4 * MIB,
    }
    notebook.run("%vram doctor")


def test_tensors_without_memory_of_their_own_do_no_harm(notebook):
    notebook.run(
        "from torch._subclasses.fake_tensor import FakeTensorMode\n"
        "with FakeTensorMode():\n    fake = torch.ones(2**20, device=DEVICE)\n"
        "meta = torch.empty(2**20, device='meta'); empty = torch.empty(0, device=DEVICE); lazy = nn.LazyLinear(3)\n"
        "del FakeTensorMode"
    )
    assert findings(notebook) == {}


def test_the_walk_is_bounded(notebook):
    notebook.run("long = [[number] for number in range(10**5)]; huge = list(range(2 * 10**5))")
    walk = Walk([])
    assert list(walk.tensors_from(notebook["long"])) == []
    assert walk.cut_short
    walk = Walk([])
    assert list(walk.tensors_from(notebook["huge"])) == []
    assert walk.cut_short


def test_the_walk_does_not_enter_the_notebook_itself(notebook):
    notebook.run("x = torch.ones(2**18, device=DEVICE)")
    notebook.run("a = shell = get_ipython(); b = shell.run_cell; c = globals(); d = __import__('vram_magic').manager()")
    assert findings(notebook) == {"x": (MIB, "del x")}
