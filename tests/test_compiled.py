"""What runs before `forward`, compiled code and hooks, finds the weights on the device and a lease held.

Without this, a compiled model that was evicted fails on an accelerator, since its inputs lie there and its weights do
not, or is compiled anew for the place where it happened to be; and hooks that compute a weight compute it elsewhere.
"""

from __future__ import annotations

import copy
import os
import pickle
import signal
import subprocess
import sys
import threading
import types

import pytest
import torch
from place import DEVICE
from torch import nn
from torch._dynamo import OptimizedModule
from torch._dynamo.testing import CompileCounter
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import vram_magic as vm
from vram_magic.models import compiled as compiled_calls
from vram_magic.models import entry
from vram_magic.models.entry import EntryPoints

pytestmark = pytest.mark.timeout(300)

ORIGINAL = vars(OptimizedModule)["__call__"]


@pytest.fixture
def manager_options():
    return {"block_bytes": "16KiB"}


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    with torch.no_grad():
        yield
    assert vars(OptimizedModule)["__call__"] is ORIGINAL


class Backend(CompileCounter):
    """Counts what is compiled, and asks at each run of compiled code."""

    def __init__(self, ask=lambda: None):
        super().__init__()
        self.ask = ask
        self.answers = []

    def __call__(self, graph, example_inputs):
        run = super().__call__(graph, example_inputs)

        def asking(*args):
            self.answers.append(self.ask())
            return run(*args)

        return asking


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        return self.second(self.first(x).relu())

    def encode(self, x):
        return self.first(x)


class Outer(nn.Module):
    """Its child is of a class that torch compiles by ``compile`` in all releases; it skips its own ones in some."""

    def __init__(self):
        super().__init__()
        self.inner, self.last = Net(), nn.Linear(64, 64)

    def forward(self, x):
        return self.last(self.inner(x))


def stack():
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))


def x():
    return torch.linspace(-1, 1, 2 * 64).view(2, 64).to(DEVICE)


def as_optimized_module(model, backend):
    return torch.compile(model, backend=backend, fullgraph=True)


def in_place(model, backend):
    model.compile(backend=backend, fullgraph=True)
    return model


WAYS = pytest.mark.parametrize("way", [as_optimized_module, in_place])
MODELS = pytest.mark.parametrize("build", [Net, stack])


# ---------------------------------------------------------------------------------------------------- compiled code


@WAYS
@MODELS
@pytest.mark.parametrize("order", ["compiled and registered", "registered and compiled", "evicted and compiled"])
def test_an_evicted_compiled_model_is_brought_in_and_not_compiled_again(mgr, way, build, order):
    model = build().to(DEVICE)
    expected, backend = model(x()), Backend(lambda: handle.state == "device" and handle.in_use)
    if order == "compiled and registered":
        compiled = way(model, backend)
        handle = mgr.register("model", model)
    else:
        handle = mgr.register("model", model)
        if order == "evicted and compiled":
            handle.evict()
        compiled = way(model, backend)
    for _ in range(4):
        handle.evict()
        assert torch.equal(compiled(x()), expected)
        assert handle.state == "device"
        assert torch.equal(compiled(x()), expected)
    assert backend.frame_count == 1
    assert backend.answers == [True] * 8
    assert not handle.in_use


@WAYS
def test_a_model_that_was_compiled_and_called_before_is_compiled_once_more_at_most(mgr, way):
    model = Net().to(DEVICE)
    expected, backend = model(x()), Backend()
    compiled = way(model, backend)
    compiled(x())
    for _ in range(3):
        handle = mgr.register("model", model)
        handle.evict()
        assert torch.equal(compiled(x()), expected)
        handle.forget()
        assert torch.equal(compiled(x()), expected)
    assert backend.frame_count <= 2


@MODELS
def test_a_compiled_module_can_be_what_is_managed(mgr, build):
    model = build().to(DEVICE)
    expected, backend = model(x()), Backend(lambda: handle.in_use and len(leases) == 1)
    compiled = as_optimized_module(model, backend)
    handle = mgr.register("model", compiled)
    leases = mgr._core.registry.get("model").leases
    assert handle.total_bytes == 2 * (64 * 64 + 64) * 4
    for _ in range(3):
        handle.evict()
        assert handle.device_bytes == 0, handle.why()
        assert torch.equal(compiled(x()), expected)
        assert handle.state == "device"
    assert backend.frame_count == 1
    assert backend.answers == [True] * 3
    handle.evict()
    assert torch.equal(model(x()), expected)  # the plain one is another way in
    assert handle.state == "device"
    handle.forget()
    assert not set(vars(model)) & {"forward", "compile", "__reduce_ex__"}


def test_methods_of_a_managed_compiled_module_hold_a_lease(mgr):
    model = Net().to(DEVICE)
    expected = model.encode(x())
    compiled = as_optimized_module(model, Backend())
    handle = mgr.register("model", compiled)
    seen = []
    model.first.register_forward_hook(lambda *_: seen.append(handle.in_use))
    assert torch.equal(compiled.encode(x()), expected)
    handle.evict()
    assert torch.equal(compiled.encode(x()), expected)
    assert seen == [True, True]


def test_a_pipeline_that_holds_a_compiled_module_brings_it_in(mgr):
    class Pipeline:
        def __init__(self):
            self.net, self.other = Net().to(DEVICE), nn.Linear(64, 64).to(DEVICE)

    pipeline, backend = Pipeline(), Backend()
    expected = pipeline.net(x())
    handle = mgr.register("pipeline", pipeline)
    plain, pipeline.net = pipeline.net, as_optimized_module(pipeline.net, backend)  # as diffusers users do
    for _ in range(3):
        handle.evict()
        assert torch.equal(pipeline.net(x()), expected)
        assert handle.state == "device"
    assert backend.frame_count == 1
    del plain


@WAYS
def test_a_compiled_child_called_from_outside_brings_its_model_in(mgr, way):
    model = Outer().to(DEVICE)
    expected, backend = model.inner(x()), Backend()
    handle = mgr.register("model", model)
    compiled = way(model.inner, backend)
    for _ in range(3):
        handle.evict()
        assert torch.equal(compiled(x()), expected)
        assert handle.state == "device"
    assert backend.frame_count == 1


@WAYS
def test_children_that_are_compiled_work_inside_their_model(mgr, way):
    model = Outer().to(DEVICE)
    expected, backend = model(x()), Backend()
    model.inner = way(model.inner, backend)
    handle = mgr.register("model", model)
    for _ in range(3):
        handle.evict()
        assert torch.equal(model(x()), expected)
    assert backend.frame_count == 1


@pytest.mark.parametrize("order", ["compiled and registered", "registered and compiled", "evicted and compiled"])
def test_a_compiled_method_in_the_place_of_forward_is_called_under_the_lease(mgr, order):
    model = Net().to(DEVICE)
    expected, backend = model(x()), Backend(lambda: handle.in_use)

    def compile_forward():
        model.forward = torch.compile(model.forward, backend=backend, fullgraph=True)

    if order == "compiled and registered":
        compile_forward()
    handle = mgr.register("model", model)
    if order == "evicted and compiled":
        handle.evict()
    if order != "compiled and registered":
        compile_forward()
    for _ in range(3):
        handle.evict()
        assert torch.equal(model(x()), expected)
        assert handle.state == "device"
    assert backend.frame_count == 1
    assert backend.answers == [True] * 3


def test_a_compiled_model_leaves_for_another_and_both_stay_right(mgr):
    models = [stack().to(DEVICE) for _ in range(2)]
    expected = [model(x()) for model in models]
    handles = [mgr.register(f"model{number}", model) for number, model in enumerate(models)]
    compiled = [as_optimized_module(models[0], Backend()), in_place(models[1], Backend())]
    size = handles[0].total_bytes
    del models
    mgr.budget_bytes = mgr.used_bytes - size // 2
    for _ in range(3):
        for run, result in zip(compiled, expected, strict=True):
            assert torch.equal(run(x()), result)
    assert mgr.used_bytes <= mgr.budget_bytes


@pytest.mark.skipif(DEVICE != "cpu", reason="the simulation has no code generator")
def test_code_that_is_really_compiled_computes_the_same_after_an_eviction(mgr):
    model = stack()
    handle = mgr.register("model", model)
    compiled = torch.compile(model, fullgraph=True)
    expected = compiled(x())
    handle.evict()
    assert torch.equal(compiled(x()), expected)
    assert handle.state == "device"


@pytest.mark.simulation_only
@WAYS
def test_inputs_are_brought_to_a_compiled_model_and_lengths_are_not(mgr, way):
    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(64, 64)

        @torch.compiler.disable
        def check(self, lengths):
            assert lengths.device.type == "cpu"

        def forward(self, x, lengths):
            self.check(lengths)
            return self.inner(x)

    model = Packed().to(DEVICE)
    expected = model.inner(x())
    handle = mgr.register("model", model)
    options = {"backend": Backend()}
    compiled = torch.compile(model, **options) if way is as_optimized_module else model
    if compiled is model:
        model.compile(**options)
    handle.evict()
    for _ in range(2):
        got = compiled(x().cpu(), torch.tensor([3, 2]))
        assert got.device.type == DEVICE
        assert torch.equal(got, expected)


def test_a_function_that_calls_a_managed_model_computes_right_or_fails_clearly(mgr):
    model = Net().to(DEVICE)
    expected = model(x())
    handle = mgr.register("model", model)
    function = torch.compile(lambda x: model(x) + 0, backend=Backend())
    assert torch.equal(function(x()), expected)
    handle.evict()
    if DEVICE == "cpu":
        assert torch.equal(function(x()), expected)
    else:
        with pytest.raises(RuntimeError, match="device"):
            function(x())
    with handle.lease():
        assert torch.equal(function(x()), expected)


def test_a_compiled_model_in_a_frame_that_the_compiler_gave_up_is_brought_in(mgr):
    model = Net().to(DEVICE)
    expected, inner = model(x()), Backend(lambda: handle.in_use)
    compiled = torch.compile(model, backend=inner)
    handle = mgr.register("model", model)

    def function(x):
        for _ in range(1):
            torch._dynamo.graph_break()  # in a loop: the whole frame is given up
            x = compiled(x)
        return x

    outer = torch.compile(function, backend=Backend())
    for _ in range(3):
        handle.evict()
        assert torch.equal(outer(x()), expected)
        assert handle.state == "device"
    assert all(inner.answers)


# ------------------------------------------------------------------------------------------------ leaving no trace


def test_copies_and_pickles_of_a_compiled_managed_model_are_plain(mgr):
    model = in_place(Net().to(DEVICE), Backend())
    expected = model(x())
    handle = mgr.register("model", model)
    model.first.register_forward_pre_hook(print_nothing)
    handle.evict()
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        for part in copied.modules():
            assert not set(vars(part)) & {"forward", "_call_impl", "_compiled_call_impl", "compile", "__reduce_ex__"}
        assert torch.equal(copied.to(DEVICE)(x()), expected)
    assert model(x()) is not None
    assert set(vars(model)) >= {"forward", "_compiled_call_impl", "compile", "__reduce_ex__"}


def print_nothing(module, args):
    """A hook that a pickle can name."""


def test_everything_is_put_back_as_it_was(mgr):
    model = in_place(Net().to(DEVICE), Backend())
    model.register_forward_pre_hook(print_nothing)
    before = [dict(vars(part)) for part in model.modules()]
    handle = mgr.register("model", model)
    handle.evict()
    model(x())
    handle.evict()
    handle.forget()
    for part, was in zip(model.modules(), before, strict=True):
        assert vars(part).keys() == was.keys()
        assert vars(part).get("_compiled_call_impl") is was.get("_compiled_call_impl")


def test_compile_after_forget_leaves_a_plain_model(mgr):
    model = Net().to(DEVICE)
    handle = mgr.register("model", model)
    compile_method = model.compile
    handle.forget()
    compile_method(backend=Backend())
    assert isinstance(vars(model)["_compiled_call_impl"], types.FunctionType)
    assert "forward" not in vars(model)


def test_compile_of_a_model_that_is_gone_says_so(mgr):
    model = Net().to(DEVICE)
    mgr.register("model", model)
    compile_method = model.compile
    del model
    with pytest.raises(vm.UnknownModelError, match="gone"):
        compile_method()


def test_the_call_of_compiled_modules_is_replaced_while_some_model_needs_it(mgr):
    first = mgr.register("first", one := Net().to(DEVICE))
    second = mgr.register("second", other := Net().to(DEVICE))
    ours = vars(OptimizedModule)["__call__"]
    assert ours is not ORIGINAL
    first.forget()
    first.forget()
    assert vars(OptimizedModule)["__call__"] is ours
    second.forget()
    assert vars(OptimizedModule)["__call__"] is ORIGINAL
    del one, other


def test_compiled_modules_of_nobody_ours_are_called_as_ever(mgr):
    mgr.register("model", model := Net().to(DEVICE))
    plain = Net().to(DEVICE)
    compiled = torch.compile(plain, backend=Backend())
    assert torch.equal(compiled(x()), plain(x()))
    with pytest.raises(TypeError, match="forward"):
        compiled()
    del model


def test_what_somebody_else_puts_over_it_stays(mgr):
    model = Net().to(DEVICE)
    expected, backend = model(x()), Backend(lambda: handle.in_use)
    compiled = as_optimized_module(model, backend)
    handle = mgr.register("model", model)
    ours, calls = vars(OptimizedModule)["__call__"], []

    def theirs(self, *args):
        calls.append(1)
        return ours(self, *args)

    OptimizedModule.__call__ = theirs
    handle.evict()
    assert torch.equal(compiled(x()), expected)
    assert backend.answers == [True]
    assert vars(OptimizedModule)["__call__"] is theirs
    handle.forget()
    assert vars(OptimizedModule)["__call__"] is theirs
    assert torch.equal(compiled(x()), expected)
    assert len(calls) == 2
    OptimizedModule.__call__ = ORIGINAL


def test_it_comes_back_when_somebody_puts_the_original_in_its_place(mgr):
    model = Net().to(DEVICE)
    expected = model(x())
    compiled = as_optimized_module(model, Backend())
    handle = mgr.register("model", model)
    OptimizedModule.__call__ = ORIGINAL
    handle.evict()
    assert torch.equal(compiled(x()), expected)
    assert handle.state == "device"


FIRST_COMPILE = """
import sys
from place import DEVICE
import torch
from torch import nn
import vram_magic as vm

with vm.VRAMManager(device=DEVICE, budget="1GiB") as mgr, torch.no_grad():
    model, x = nn.Sequential(nn.Linear(8, 8)).to(DEVICE), torch.ones(1, 8, device=DEVICE)
    expected = model(x)
    finders = list(sys.meta_path)
    handle = mgr.register("model", model)
    handle.evict()
    assert "torch._dynamo" not in sys.modules, "imported for nothing"
    compiled = torch.compile(model, backend=lambda graph, _: graph.forward, fullgraph=True)
    assert torch.equal(compiled(x), expected)
    assert handle.state == "device"
    assert sys.meta_path == finders
    other = type(compiled).__call__
    handle.forget()
    assert type(compiled).__call__ is not other
"""


def test_the_compiler_is_not_imported_and_is_seen_when_it_is():
    done = subprocess.run(
        [sys.executable, "-c", FIRST_COMPILE], check=False, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr


NO_COMPILE = """
import sys
from place import DEVICE
import torch
from torch import nn
import vram_magic as vm

model, finders = nn.Linear(8, 8).to(DEVICE), list(sys.meta_path)
with vm.VRAMManager(device=DEVICE, budget="1GiB") as mgr:
    mgr.register("model", model)
    assert sys.meta_path != finders
assert [finder for finder in sys.meta_path if finder.__class__.__module__.startswith("vram_magic")] == []
assert "torch._dynamo" not in sys.modules
import torch._dynamo
assert torch._dynamo.OptimizedModule.__call__.__module__ == "torch._dynamo.eval_frame"
"""


def test_nobody_waits_for_the_compiler_once_the_last_model_is_gone():
    done = subprocess.run([sys.executable, "-c", NO_COMPILE], check=False, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def test_a_load_waits_for_the_entry_points_of_what_is_compiled_meanwhile(mgr, monkeypatch):
    model = Net().to(DEVICE)
    handle = mgr.register("model", model)
    handle.evict()
    shadow, reached, go_on = EntryPoints._shadow, threading.Event(), threading.Event()

    def slowly(self, module, owner, *, out=False):
        if out and threading.current_thread() is compiling:
            reached.set()
            go_on.wait(60)
        return shadow(self, module, owner, out=out)

    monkeypatch.setattr(EntryPoints, "_shadow", slowly)
    compiling = threading.Thread(target=model.first.compile, kwargs={"backend": Backend()})
    loading = threading.Thread(target=handle.load)
    compiling.start()
    assert reached.wait(60)
    loading.start()
    loading.join(0.3)  # its chance to go on while it should not
    go_on.set()
    compiling.join()
    loading.join()
    assert not any("forward" in vars(child) for child in model.children())  # at once: a later look would repair it
    assert handle.state == "device"


def test_an_eviction_that_fails_while_it_shadows_leaves_the_children_as_they_were(mgr, monkeypatch):
    model = Net().to(DEVICE)
    expected = model(x())
    handle = mgr.register("model", model)
    shadow = EntryPoints._shadow

    def fails(self, module, owner, *, out=False):
        if module is model.second:
            raise MemoryError("no more")
        return shadow(self, module, owner, out=out)

    with monkeypatch.context() as patch:
        patch.setattr(EntryPoints, "_shadow", fails)
        with pytest.raises(MemoryError, match="no more"):
            handle.evict()
        assert "forward" not in vars(model.first)
    assert handle.state == "device"
    handle.evict()
    assert "forward" in vars(model.second)
    assert torch.equal(model(x()), expected)


@pytest.mark.cpu_only("fork")
def test_a_forked_child_does_not_wait_for_a_thread_that_it_has_not(mgr):
    model = Net().to(DEVICE)
    mgr.register("model", model)
    holding, done = threading.Event(), threading.Event()

    def hold():
        with entry._lock, compiled_calls._lock:
            holding.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert holding.wait(60)
    child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)
        model.compile(backend="eager")
        os._exit(0 if "_compiled_call_impl" in vars(model) else 1)
    status = os.waitpid(child, 0)[1]
    done.set()
    thread.join()
    assert os.waitstatus_to_exitcode(status) == 0


# -------------------------------------------------------------------------------------------------------------- hooks


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize("wrap", [nn.utils.spectral_norm, nn.utils.weight_norm])
@pytest.mark.parametrize("place", ["root", "child"])
@pytest.mark.parametrize("training", [True, False])
def test_hooks_that_compute_a_weight_find_what_they_compute_it_from(mgr, wrap, place, training):
    layer = wrap(nn.Linear(64, 64).to(DEVICE)).train(training)
    model = layer if place == "root" else nn.Sequential(layer)
    twin = copy.deepcopy(model)
    handle = mgr.register("model", model)
    for _ in range(3):
        handle.evict()
        assert handle.device_bytes == 0, handle.why()
        assert torch.equal(layer(x()), twin(x()))
        assert handle.state == "device"
        assert torch.equal(model(x()), twin(x()))


@pytest.fixture(params=["registered before", "registered after", "registered while it is out"])
def hooked(request, mgr):
    """A managed linear layer, a hook's registration, and the handle."""

    def make(register):
        model = nn.Linear(64, 64).to(DEVICE)
        if request.param == "registered before":
            register(model)
        handle = mgr.register("model", model)
        if request.param == "registered while it is out":
            handle.evict()
        if request.param != "registered before":
            register(model)
        return model, handle

    return make


def test_a_hook_that_reads_a_weight_finds_it_on_the_device_and_the_lease_held(hooked):
    seen = []

    def scaled(module, args):
        seen.append((module.weight.device.type, handle.in_use))
        return (args[0] @ module.weight,)

    model, handle = hooked(lambda model: model.register_forward_pre_hook(scaled))
    expected = nn.functional.linear(x() @ model.weight.to(DEVICE), model.weight.to(DEVICE), model.bias.to(DEVICE))
    for _ in range(3):
        handle.evict()
        assert torch.equal(model(x()), expected)
        assert handle.state == "device"
    assert seen == [(DEVICE, True)] * 3


def test_a_hook_after_forward_is_in_the_same_lease(hooked):
    seen = []
    model, handle = hooked(
        lambda model: model.register_forward_hook(
            lambda module, args, result: seen.append((result @ module.weight).device.type) or handle.in_use
        )
    )
    for _ in range(3):
        handle.evict()
        assert model(x()) is True
    assert seen == [DEVICE] * 3


def test_a_hook_of_all_modules_finds_the_weights_of_an_evicted_one(mgr):
    model, seen = nn.Linear(64, 64).to(DEVICE), []
    handle = mgr.register("model", model)
    hook = nn.modules.module.register_module_forward_pre_hook(
        lambda module, args: seen.append(module.weight.device.type)
    )
    try:
        handle.evict()
        model(x())
    finally:
        hook.remove()
    assert seen == [DEVICE]


@pytest.mark.simulation_only
def test_inputs_are_brought_before_hooks_run_and_lengths_stay(mgr):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(64, 64, batch_first=True)

        def forward(self, x, lengths):
            packed = pack_padded_sequence(x, lengths, batch_first=True)
            return pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0]

    model, seen = Recurrent().to(DEVICE), []
    model.register_forward_pre_hook(lambda module, args: seen.append([value.device.type for value in args]))
    sequences, lengths = torch.ones(2, 3, 64), torch.tensor([3, 2])
    expected = model(sequences.to(DEVICE), lengths)
    handle = mgr.register("model", model)
    handle.evict()
    assert torch.equal(model(sequences, lengths), expected)
    assert torch.equal(model(sequences, lengths), expected)
    assert seen == [[DEVICE, "cpu"]] * 3


def test_without_hooks_and_compiling_a_present_model_has_no_more_than_its_own_methods_shadowed(mgr):
    model = Net().to(DEVICE)
    handle = mgr.register("model", model)
    for _ in range(2):
        assert "_call_impl" not in vars(model)
        assert not any("forward" in vars(child) for child in model.children())
        handle.evict()
        model(x())


def test_a_hooked_model_is_put_back_and_copied_as_it_was(mgr):
    model = nn.Sequential(nn.Linear(64, 64)).to(DEVICE)
    model.register_forward_pre_hook(print_nothing)
    handle = mgr.register("model", model)
    assert "_call_impl" in vars(model)
    for evicted in (False, True):
        if evicted:
            handle.evict()
        for copied in (copy.deepcopy(model), copy.copy(model), pickle.loads(pickle.dumps(model))):
            assert not set(vars(copied)) & {"forward", "_call_impl", "compile", "__reduce_ex__"}
    model(x())
    pickle.dumps(model)  # after the children are not watched any more
    handle.forget()
    assert not set(vars(model)) & {"forward", "_call_impl", "compile", "__reduce_ex__"}
