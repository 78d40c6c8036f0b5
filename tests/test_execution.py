"""On an accelerator, inputs are brought to where a model computes, and its ``device`` says where that is.

Without this, code that asks an evicted model where it is makes its inputs on the CPU, and the call that brings the
model back fails because they lie on the wrong side; or a caller's own objects come back changed.

Without an accelerator the tests run on torch's fake tensors, which have a device and no values; those that look at
values or gradients then skip. A manager is not needed: entry points ask a register for leases, and a small one is here.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import inspect
import os
import pickle
import types
import weakref
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Mapping, MutableMapping
from typing import NamedTuple

import pytest
import torch
from place import DEVICE
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.rnn import PackedSequence

from vram_magic.models import execution
from vram_magic.models.entry import EntryPoints
from vram_magic.models.working import Working

pytestmark = pytest.mark.timeout(180)

CUDA = torch.device("cuda", 0)


class Pair(NamedTuple):
    left: object
    right: object


class Model:
    """A managed model, as entry points know it."""

    name, complete, forgotten = "model", True, False
    working = Working()


class Register:
    """Grants every lease, and knows which call this thread is in."""

    def __init__(self):
        self.stack = []

    def inside(self, model):
        return bool(self.stack) and self.stack[-1] is model

    def begin(self, model, *, suspended=False, bring=True):
        self.stack.append(model)
        return model

    def end(self, lease):
        self.stack.remove(lease)


class Net(nn.Module):
    """Methods that hand out what reached them."""

    def forward(self, *args, **kwargs):
        return args[0] if args else kwargs

    def with_lengths(self, x, lengths, more=None):
        return x, lengths, more

    def save_pretrained(self, x):
        return x

    def read_from(self, state_dict):
        return state_dict

    def call(self, function, *args):
        return function(*args)

    def stream(self, x):
        yield x


@pytest.fixture
def accelerator():
    """Runs the test on fake tensors where there is no accelerator."""
    with contextlib.ExitStack() as modes:
        modes.enter_context(torch.no_grad())
        if not torch.cuda.is_available():
            modes.enter_context(FakeTensorMode())
        yield CUDA


@pytest.fixture
def cuda():
    """Asks for an accelerator that computes."""
    if not torch.cuda.is_available():
        pytest.skip("needs an accelerator")
    return CUDA


@pytest.fixture
def manage():
    """Installs entry points on a module, as a manager of the accelerator does."""
    installed = []

    def managed(module, model=None, registry=None, thing=None, device=CUDA):
        entries = EntryPoints(registry or Register(), [module], device, thing)
        entries.install(model or Model())
        installed.append(entries)
        return entries

    yield managed
    for entries in installed:
        entries.remove()


@pytest.fixture
def net(accelerator, manage):
    net = Net()
    manage(net)
    return net


# ------------------------------------------------------------------------------------------------------- inputs


class Items(list):
    """A list with an attribute."""


class Own(MutableMapping):
    """A mapping that keeps its items where a shallow copy would share them."""

    def __init__(self, items=()):
        self.inner = dict(items)

    def __getitem__(self, key):
        return self.inner[key]

    def __setitem__(self, key, value):
        self.inner[key] = value

    def __delitem__(self, key):
        del self.inner[key]

    def __iter__(self):
        return iter(self.inner)

    def __len__(self):
        return len(self.inner)


class Labelled(Pair):
    """A named tuple with an attribute."""


class Parts(nn.Module, UserDict):
    """A module that is a mapping as well."""

    __hash__ = nn.Module.__hash__

    def __init__(self, **items):
        super().__init__()
        self.data = items


def batch_encoding(x):
    from transformers import BatchEncoding

    return BatchEncoding({"input_ids": x, "text": "a"})


def batch_feature(x):
    from transformers import BatchFeature

    return BatchFeature({"pixel_values": x, "text": "a"})


def model_output(x):
    from transformers.modeling_outputs import BaseModelOutput

    return BaseModelOutput(last_hidden_state=x, hidden_states=(x, "a"))


CONTAINERS = {
    "tensor": lambda x: x,
    "list": lambda x: [x, "a"],
    "list of a class": lambda x: Items([x, "a"]),
    "tuple": lambda x: (x, "a"),
    "namedtuple": lambda x: Pair(x, "a"),
    "what max gives": lambda x: torch.return_types.max((x, x)),
    "dict": lambda x: {"x": x, "text": "a"},
    "OrderedDict": lambda x: OrderedDict(x=x, text="a"),
    "defaultdict": lambda x: defaultdict(list, x=x),
    "UserDict": lambda x: UserDict(x=x, text="a"),
    "own mapping": lambda x: Own({"x": x, "text": "a"}),
    "mapping that cannot be written": lambda x: types.MappingProxyType({"x": x, "text": "a"}),
    "nested": lambda x: {"x": [(x, {"deep": x}), "a"], 3: None},
    "BatchEncoding": batch_encoding,
    "BatchFeature": batch_feature,
    "ModelOutput": model_output,
}


def tensors_in(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        return tensors_in(list(value.values()))
    return [tensor for item in value for tensor in tensors_in(item)] if isinstance(value, list | tuple) else []


def shape_of(value):
    """The structure without its tensors."""
    if isinstance(value, Mapping):
        return type(value), {key: shape_of(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value), [shape_of(item) for item in value]
    return torch.Tensor if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("passed", ["positional", "keyword"])
@pytest.mark.parametrize("container", CONTAINERS)
def test_tensors_come_along_in_containers_of_the_same_kind_and_the_callers_stay(net, container, passed):
    given = CONTAINERS[container](torch.zeros(3))
    before = tensors_in(given)
    got = net(given) if passed == "positional" else net(value=given)["value"]
    assert shape_of(got) == shape_of(given)
    assert {tensor.device for tensor in tensors_in(got)} == {CUDA}
    assert all(now is then for now, then in zip(tensors_in(given), before, strict=True))
    assert {tensor.device.type for tensor in before} == {"cpu"}


@pytest.mark.parametrize("container", CONTAINERS)
def test_what_is_there_already_reaches_the_method_as_the_same_object(net, container):
    given = CONTAINERS[container](torch.zeros(3, device=CUDA))
    assert net(given) is given


def test_only_the_containers_of_what_moves_are_copied(net):
    there = [torch.zeros(3, device=CUDA)]
    first, second = net([there, torch.zeros(3)])
    assert first is there
    assert second.device == CUDA


def test_attributes_of_containers_are_kept(net):
    items = Items([torch.zeros(3)])
    items.source = "here"
    assert net(items).source == "here"
    pair = Labelled(torch.zeros(3), 1)
    pair.label = "a pair"
    assert net(pair).label == "a pair"
    encoding = batch_encoding(torch.zeros(3))
    encoding._encodings = ["of a fast tokenizer"]
    assert net(encoding)._encodings is encoding._encodings
    assert net(defaultdict(list, x=torch.zeros(3)))["new"] == []
    output = net(model_output(torch.zeros(3)))
    assert output.last_hidden_state is output["last_hidden_state"]


LEFT = {
    "a module": lambda: nn.Linear(2, 2),
    "a list of modules": lambda: [nn.Linear(2, 2)],
    "a module that is a mapping": lambda: Parts(x=torch.zeros(3)),
    "a number": lambda: torch.tensor(3.0),
    "a tensor without memory": lambda: torch.zeros(3, device="meta"),
    "a generator": torch.Generator,
    "text": lambda: "a",
    "a size": lambda: torch.Size([3]),
    "an iterator": lambda: iter([torch.zeros(3)]),
}


@pytest.mark.parametrize("kind", LEFT)
def test_what_is_no_input_to_move_is_left_alone(net, kind):
    given = LEFT[kind]()
    assert net(given) is given
    got = net([given, torch.zeros(3)])  # beside something that moves
    assert got[0] is given
    assert got[1].device == CUDA
    if isinstance(given, nn.Module):
        assert {weight.device.type for weight in given.parameters()} <= {"cpu"}


def test_tensors_of_another_kind_of_accelerator_are_left_alone(manage):
    if torch.cuda.is_available():
        pytest.skip("a process with one real accelerator has no other kind")
    with FakeTensorMode(), torch.no_grad():
        net, elsewhere = Net(), torch.zeros(3, device="xpu:0")
        manage(net)
        assert net(elsewhere) is elsewhere
        assert net(torch.zeros(3, device="cuda:1")).device == CUDA


def test_integer_lengths_stay_where_they_are(net):
    x, lengths = torch.zeros(2, 3), torch.tensor([3, 2])
    for got in (
        net.with_lengths(x, lengths),
        net.with_lengths(x, lengths=lengths),
        net.with_lengths(lengths=lengths, x=x),
    ):
        assert got[0].device == CUDA
        assert got[1] is lengths
    assert net({"x": x, "x_len": lengths})["x_len"] is lengths
    assert net.with_lengths(x, [lengths])[1][0] is lengths
    assert net.with_lengths(x, lengths.float())[1].device == CUDA
    assert net.with_lengths(lengths, lengths)[0].device == CUDA


def test_a_state_dict_is_not_brought_along(net):
    weights = {"weight": torch.zeros(3)}
    assert net.read_from(weights) is weights
    assert net.read_from(state_dict=weights)["weight"].device.type == "cpu"


def test_packed_sequences_keep_their_batch_sizes_on_the_cpu(net):
    packed = PackedSequence(torch.zeros(5, 1), torch.tensor([2, 2, 1]))
    got = net(packed)
    assert type(got) is PackedSequence
    assert got.data.device == CUDA
    assert got.batch_sizes.device.type == "cpu"


def test_one_object_passed_twice_stays_one_object(net):
    x = torch.zeros(3)
    shared = [x]
    first, second, both, tensor = net([shared, shared, {"shared": shared}, x])
    assert first is second is both["shared"]
    assert first[0] is tensor


def test_a_container_that_contains_itself_ends(net):
    items = [torch.zeros(3, device=CUDA)]
    items.append(items)
    assert net(items) is items
    items[0] = torch.zeros(3)
    assert net(items)[0].device == CUDA


def test_a_container_that_cannot_be_copied_goes_as_it_is(net):
    class Sealed(list):
        def __reduce_ex__(self, protocol):
            raise TypeError("cannot be copied")

    class Strict(Own):
        def __init__(self, first, second):
            super().__init__({"first": first, "second": second})

    for given in (Sealed([torch.zeros(3)]), Strict(torch.zeros(3), 2)):
        assert net(given) is given


def test_what_the_method_puts_into_a_container_is_the_callers(net):
    x, y = torch.zeros(3), torch.zeros(3)
    store, cache, own = [x], {"x": x, "y": y, "old": 1}, Own({"x": x})
    result = torch.zeros(3, device=CUDA)

    def write(store, cache, own):
        assert store[0].device == cache["x"].device == own["x"].device == CUDA
        store.append(result)
        store.append(cache["y"])
        cache["x"] = result
        cache["list"] = store
        del cache["old"]
        own["new"] = 2

    net.call(write, store, cache, own)
    assert store[0] is x
    assert store[1] is result
    assert store[2] is y
    assert list(cache) == ["x", "y", "list"]
    assert cache["x"] is result
    assert cache["y"] is y
    assert cache["list"] is store
    assert own["x"] is x
    assert own["new"] == 2


def test_what_was_written_before_an_error_is_the_callers_too(net):
    store = [torch.zeros(3)]

    def write(store):
        store.append("result")
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        net.call(write, store)
    assert store[1:] == ["result"]


def test_inputs_of_a_generator_are_brought_along(net):
    assert next(net.stream(torch.zeros(3))).device == CUDA


def test_only_the_outermost_call_of_a_model_brings_inputs_along(accelerator, manage):
    registry, model, net, other = Register(), Model(), Net(), Net()
    manage(net, model, registry)
    manage(other, Model(), registry)
    inner = torch.zeros(3)
    assert net.call(lambda: net(inner)) is inner
    assert net.call(lambda: other(inner)).device == CUDA


@pytest.mark.parametrize("state", [{"complete": False}, {"forgotten": True}], ids=str)
def test_a_model_that_computes_where_it_is_gets_its_inputs_as_they_are(accelerator, manage, state):
    net, model, x = Net(), Model(), torch.zeros(3)
    manage(net, model)
    vars(model).update(state)
    assert net(x) is x


def test_saving_moves_nothing(net):
    x = torch.zeros(3)
    assert net.save_pretrained(x) is x


def test_a_traced_call_moves_nothing(net, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    x = torch.zeros(3)
    assert net(x) is x


def test_a_lack_of_room_for_inputs_reaches_the_caller_and_ends_the_lease(accelerator, manage):
    class Large(UserDict):
        def __iter__(self):
            raise torch.OutOfMemoryError("no room")  # the first copy that is made of it

    registry, net = Register(), Net()
    manage(net, registry=registry)
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        net([torch.zeros(3), Large(x=torch.zeros(3))])
    assert registry.stack == []


def test_on_the_cpu_the_method_itself_is_called(manage):
    net, x = Net(), torch.zeros(3)
    manage(net, device=None)
    assert vars(net)["forward"]._carrier is None
    assert net(x) is x


def test_a_method_of_the_instance_gets_its_inputs_too(accelerator, manage):
    net = Net()
    net.forward = lambda x, text_len: (x, text_len)
    manage(net)
    lengths = torch.tensor([1, 2])
    x, stayed = net(torch.zeros(3), lengths)
    assert x.device == CUDA
    assert stayed is lengths


@pytest.mark.parametrize("device", [CUDA, None], ids=str)
def test_a_method_bound_to_the_instance_stays_its_own(accelerator, manage, device):
    net = Net()
    net.forward = types.MethodType(lambda self, x: (self, "its own"), net)
    entries, x = manage(net, device=device), torch.zeros(3, device=CUDA)
    for made in (net, copy.deepcopy(net), copy.copy(net)):
        assert made(x)[1] == "its own"
    assert net(x)[0] is net
    entries.watch_children(Model())
    entries.unwatch_children()
    entries.remove()
    assert type(vars(net)["forward"]) is types.MethodType
    assert net(x) == (net, "its own")


def test_a_method_that_the_user_wraps_and_puts_back_is_called_once_for_each(accelerator, manage):
    net, calls = Net(), []
    manage(net)
    inner = net.forward

    @functools.wraps(inner)  # it copies the attributes of what it wraps
    def forward(*args):
        calls.append(args)
        return inner(*args)

    net.forward = forward
    manage(net)
    assert net(torch.zeros(3)).device == CUDA
    assert len(calls) == 1


def test_a_child_that_is_a_model_of_its_own_brings_its_inputs_along(accelerator, manage):
    net = Net()
    net.encoder, net.layer = Named(), nn.Identity()
    entries = manage(net)
    x = torch.zeros(3)
    assert net.encoder(x).device == CUDA
    assert net.layer(x) is x  # while everything is there, single layers are not shadowed
    entries.remove()
    assert net.encoder(x) is x


# ------------------------------------------------------------------------------------------------ with values


def tiny_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=2)).eval()


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 8))

    def forward(self, x):
        return x * self.weight


class Bringing(Register):
    """Brings the weights in at the first call, as the manager does."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def begin(self, model, **more):
        for weight in self.module.parameters():
            weight.data = weight.data.to(CUDA)
        return super().begin(model, **more)


def test_inputs_made_where_the_evicted_weights_were_give_the_right_result(cuda, manage):
    scale = Scale()
    x = torch.linspace(0, 3, 8, device=next(scale.parameters()).device)
    expected = x * scale.weight.detach().clone()
    manage(scale, registry=Bringing(scale))
    with torch.no_grad():
        got = scale(x)
    assert got.device == cuda
    assert torch.equal(got.cpu(), expected)
    assert x.device.type == "cpu"


def test_moved_inputs_stay_in_the_graph(cuda, manage):
    scale, x = Scale().to(cuda), torch.linspace(0, 3, 8, requires_grad=True)
    manage(scale)
    scale(x).sum().backward()
    assert torch.equal(x.grad, scale.weight.detach().cpu())


def test_subclasses_of_tensors_keep_their_class(cuda, manage):
    class Named(torch.Tensor):
        pass

    net, x = Net(), torch.linspace(0, 3, 8).as_subclass(Named)
    manage(net)
    got = net(x)
    assert type(got) is Named
    assert got.device == cuda
    assert torch.equal(got.cpu(), x)


def evicted(mgr, model, name="model"):
    handle = mgr.register(name, model.to(DEVICE))
    handle.evict()
    assert handle.device_bytes == 0, handle.why()
    return handle


MOVES = {
    "half": lambda model: model.half(),
    "double": lambda model: model.double(),
    "cpu": lambda model: model.cpu(),
    "to a dtype": lambda model: model.to(torch.float64),
    "to a device": lambda model: model.to(DEVICE),
    "to a device and dtype": lambda model: model.to(DEVICE, torch.float64),
    "to where it is called": lambda model: getattr(model, DEVICE)(),
}


@pytest.mark.parametrize("move", MOVES)
def test_an_evicted_model_can_be_converted_and_moved(mgr, move):
    with torch.no_grad():
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        weights, expected = list(model.parameters()), MOVES[move](copy.deepcopy(model).to(DEVICE))
        evicted(mgr, model)
        assert MOVES[move](model) is model
        for now, weight, then in zip(model.parameters(), weights, expected.parameters(), strict=True):
            assert now is weight
            assert now.dtype == then.dtype
            assert torch.equal(now.cpu(), then.cpu())
        x = torch.linspace(-1, 1, 64, dtype=model[0].weight.dtype)
        assert torch.equal(model(x.to(DEVICE)), expected.to(DEVICE)(x.to(DEVICE)))
        assert {weight.device.type for weight in weights} == {DEVICE}


@pytest.mark.simulation_only
def test_inputs_made_for_where_the_weights_were_last_seen_reach_an_evicted_model_and_a_present_one(mgr):
    model = Named()
    model.scale = Scale()
    model.forward = lambda x: model.scale(x) + 0  # not the child itself
    expected = torch.linspace(0, 3, 8) * model.scale.weight.detach()
    handle = evicted(mgr, model)
    seen = next(model.parameters()).device
    assert (seen, model.device) == (CPU, CUDA)
    for _ in range(2):
        assert torch.equal(model(torch.linspace(0, 3, 8, device=seen)).cpu(), expected)
        assert torch.equal(model(torch.linspace(0, 3, 8, device=model.device)).cpu(), expected)
        assert handle.state == "device"
    handle.forget()
    assert vars(Named)["device"] is ORIGINAL


@pytest.mark.simulation_only
def test_an_idle_model_leaves_for_the_inputs_of_another(mgr):
    layer, net = nn.Linear(2048, 2048, bias=False).to(DEVICE), Net()  # 16 MiB
    net.weight = nn.Parameter(torch.zeros(8, device=DEVICE))
    idle = mgr.register("idle", layer)
    mgr.register("model", net)
    mgr.budget_bytes = mgr.used_bytes + 24 * 2**20
    assert idle.state == "device"
    assert net(torch.zeros(32, 2**20, dtype=torch.uint8)).device == CUDA  # 32 MiB: 8 are missing
    assert idle.device_bytes == 0


@pytest.mark.simulation_only
def test_inputs_for_which_there_is_no_room_fail_as_any_allocation_and_leave_no_lease(mgr):
    net = Net()
    net.weight = nn.Parameter(torch.zeros(8, device=DEVICE))
    handle = mgr.register("model", net)
    mgr.budget_bytes = mgr.used_bytes + 24 * 2**20
    x = torch.zeros(32, 2**20, dtype=torch.uint8)
    with pytest.raises(torch.OutOfMemoryError, match=r"inside model needs 32\.0 MiB"):
        net(x)
    assert not handle.in_use
    assert x.device == CPU


@pytest.mark.simulation_only
def test_text_is_generated_from_tokens_made_on_the_cpu(mgr):
    from transformers import BatchEncoding

    llama = tiny_llama().to(DEVICE)
    ids = torch.tensor([[1, 2, 3]])
    inputs = BatchEncoding({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    expected = llama.generate(**copy.copy(inputs).to(DEVICE), **options)
    evicted(mgr, llama)
    assert llama.device == llama.model.device == CUDA
    assert torch.equal(llama.generate(**inputs, **options), expected)
    assert torch.equal(llama.generate(**inputs.to(llama.device), **options), expected)
    hidden = llama.model(ids).last_hidden_state  # a child, while all is there
    assert hidden.device == CUDA


@pytest.mark.simulation_only
def test_a_deleted_model_needs_its_property_no_more(mgr):
    model = Named()
    model.weight = nn.Parameter(torch.zeros(8, device=DEVICE))
    mgr.register("model", model)
    assert vars(Named)["device"] is not ORIGINAL
    del model
    gc.collect()
    mgr.make_room(1)
    assert vars(Named)["device"] is ORIGINAL


# ------------------------------------------------------------------------------------------------ `device`


class Named(Net):
    """A class that names its device."""

    @property
    def device(self):
        """Where the weights are."""
        return torch.device("cpu")

    def where(self, x):
        return x * (2 if self.device.type == "cpu" else 3)


ORIGINAL = vars(Named)["device"]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_stays_replaced():
    yield
    assert vars(Named)["device"] is ORIGINAL


def test_device_names_the_execution_device_of_managed_objects_only(manage):
    managed, other = Named(), Named()
    entries = manage(managed)
    assert (managed.device, other.device) == (CUDA, CPU)
    entries.remove()
    assert (managed.device, other.device) == (CPU, CPU)


def test_a_device_without_an_index_is_named_with_one(cuda, manage):
    net = Named()
    manage(net, device=torch.device("cuda"))
    assert net.device == cuda


def test_the_property_is_put_back_when_the_last_model_that_needs_it_goes(manage):
    first, second = Named(), Named()
    entries, others = manage(first), manage(second)
    entries.remove()
    assert (first.device, second.device) == (CPU, CUDA)
    entries.remove()  # once more is no more
    assert second.device == CUDA
    others.remove()
    assert vars(Named)["device"] is ORIGINAL


def test_on_the_cpu_no_property_is_replaced(manage):
    manage(Named(), device=None)
    assert vars(Named)["device"] is ORIGINAL


def test_children_name_it_too_and_those_that_are_added_later(manage):
    net = Net()
    net.inner = nn.Sequential(Named())
    entries = manage(net)
    assert net.inner[0].device == CUDA
    net.later = Named()
    entries.watch_children(Model())
    assert net.later.device == CUDA


def test_what_two_models_share_names_it_until_both_are_gone(manage):
    shared, first, second = Named(), Net(), Net()
    first.shared = second.shared = shared
    entries, others = manage(first), manage(second)
    others.remove()
    assert shared.device == CUDA
    entries.remove()
    assert shared.device == CPU


def test_of_two_execution_devices_the_one_that_is_left_is_named(manage):
    shared, other = Named(), torch.device("cuda", 1)
    manage(shared)
    entries = manage(shared, device=other)
    assert shared.device == other
    entries.remove()
    assert shared.device == CUDA


def test_a_subclass_with_its_own_property_answers_for_itself(manage):
    class Loud(Named):
        @property
        def device(self):
            return "my own"

    own = vars(Loud)["device"]
    managed, loud = Named(), Loud()
    entries = manage(managed)
    assert (managed.device, loud.device, vars(Loud)["device"]) == (CUDA, "my own", own)
    entries.remove()
    entries = manage(loud)
    assert (loud.device, Named().device, Loud().device) == (CUDA, CPU, "my own")
    entries.remove()
    assert vars(Loud)["device"] is own


class Plain(Net):
    def __init__(self):
        super().__init__()
        self.device = "mine"


class OfTheClass(Net):
    device = "mine"


class forEveryone(property):  # noqa: N801
    def __get__(self, thing, kind=None):
        return "mine"


class OfItsOwnKind(Net):
    device = forEveryone(lambda self: None)


class WithoutGetter(Net):
    device = property(None, lambda self, value: None)


@pytest.mark.parametrize("kind", [Plain, OfTheClass, OfItsOwnKind, WithoutGetter])
def test_what_is_no_plain_property_is_the_users(manage, kind):
    before, net = vars(kind).get("device"), kind()
    manage(net)
    assert vars(kind).get("device") is before
    if kind is not WithoutGetter:
        assert net.device == "mine"


def test_a_class_that_cannot_be_changed_is_left_as_it_is(manage):
    class Sealing(type):
        def __setattr__(cls, name, value):
            raise TypeError("sealed")

    class Sealed(Named, metaclass=Sealing):
        @property
        def device(self):
            return CPU

    net = Sealed()
    entries = manage(net)
    assert net.device == CPU
    entries.remove()


def test_what_somebody_else_puts_there_meanwhile_is_left(manage, monkeypatch):
    class Mine(Named):
        device = property(lambda self: CPU)

    first, second = Mine(), Mine()
    entries = manage(first)
    ours = vars(Mine)["device"]
    theirs = property(lambda self: ("theirs", ours.__get__(self)))
    Mine.device = theirs
    assert first.device == ("theirs", CUDA)
    others = manage(second)  # comes in above theirs
    assert second.device == CUDA
    entries.remove()
    others.remove()
    assert vars(Mine)["device"] is theirs
    assert second.device == ("theirs", CPU)


def test_what_somebody_else_put_there_last_is_left(manage):
    class Mine(Named):
        device = property(lambda self: CPU)

    entries = manage(Mine())
    Mine.device = "theirs"
    entries.remove()
    assert Mine.device == "theirs"


def test_a_property_that_was_deleted_meanwhile_stays_deleted(manage):
    class Mine(Named):
        device = property(lambda self: "mine")

    net = Mine()
    entries = manage(net)
    del Mine.device
    entries.remove()
    assert "device" not in vars(Mine)


def test_it_stays_a_property_that_can_be_set_read_about_and_looked_into(manage):
    class Settable(Net):
        @property
        def device(self):
            """Where I am."""
            return self.place

        @device.setter
        def device(self, value):
            self.place = value

        @device.deleter
        def device(self):
            del self.place

    net, other = Settable(), Settable()
    manage(net)
    now = vars(Settable)["device"]
    assert type(now) is property
    assert inspect.getdoc(now) == "Where I am."
    assert "return self.place" in inspect.getsource(now.fget)
    assert list(inspect.signature(now.fget).parameters) == ["self"]
    net.device = other.device = "here"
    assert (net.device, net.place, other.device) == (CUDA, "here", "here")
    del net.device
    assert not hasattr(net, "place")
    with pytest.raises(AttributeError):
        _ = Settable().device  # what the original raises


def test_copies_and_pickles_of_a_managed_object_are_plain(manage):
    net = Named()
    manage(net)
    for copied in (copy.deepcopy(net), copy.copy(net), pickle.loads(pickle.dumps(net))):
        assert copied.device == CPU
    assert pickle.loads(pickle.dumps(Named)) is Named


class Pipe:
    """Holds modules, and asks the first of them."""

    def __init__(self, net):
        self.net = net

    @property
    def device(self):
        return next(self.net.parameters()).device


def test_the_device_of_an_object_that_holds_modules(manage):
    pipe = Pipe(nn.Linear(2, 2))
    entries = manage(pipe.net, thing=pipe)
    assert (pipe.device, Pipe(pipe.net).device) == (CUDA, CPU)
    entries.remove()
    assert pipe.device == CPU


def test_an_object_that_cannot_be_referred_to_weakly_keeps_its_own_word(manage):
    class Slotted:
        __slots__ = ("net",)
        device = property(lambda self: "mine")

    holder = Slotted()
    holder.net = Named()
    manage(holder.net, thing=holder)
    assert (holder.device, holder.net.device) == ("mine", CUDA)


def test_an_object_that_dies_is_forgotten_at_once(manage):
    net = Named()
    entries, at = manage(net), id(net)
    assert at in execution._placed
    del net
    gc.collect()
    assert at not in execution._placed
    entries.remove()


def test_the_entry_of_one_that_died_says_nothing_of_who_lives_at_its_address(monkeypatch):
    other, dead = Named(), weakref.ref(Named())
    assert dead() is None
    monkeypatch.setitem(execution._placed, id(other), (dead, (CUDA,)))
    assert execution.execution_device_of(other) is None


def test_a_class_that_compares_by_value_is_no_trouble(manage):
    class Equal(Named):
        def __eq__(self, other):
            return isinstance(other, Equal)

        __hash__ = nn.Module.__hash__

    net, other = Equal(), Equal()
    manage(net)
    assert net == other
    assert (net.device, other.device) == (CUDA, CPU)


def test_traced_code_asks_the_original(manage):
    torch._dynamo.reset()
    net = Named()
    manage(net)
    x = torch.ones(3)
    compiled = torch.compile(net.where, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), x * 2)  # the property's own code was traced, without a break


def test_a_forked_child_asks_the_original(manage):
    net = Named()
    manage(net)
    child = os.fork()
    if not child:
        os._exit(0 if net.device == CPU else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert net.device == CUDA


def test_models_of_transformers_name_it_with_their_inner_models(manage):
    from transformers import PreTrainedModel

    original = inspect.getattr_static(PreTrainedModel, "device")
    managed, other = tiny_llama(), tiny_llama()
    entries = manage(managed)
    assert (managed.device, managed.model.device) == (CUDA, CUDA)
    assert (other.device, other.model.device) == (CPU, CPU)
    entries.remove()
    assert inspect.getattr_static(PreTrainedModel, "device") is original
    assert managed.device == CPU
