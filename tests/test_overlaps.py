"""Registering, forgetting, closing and looking, each in the middle of another.

Without these a model that nobody manages keeps entry points for ever, so that its calls lease nothing or fail; an
object is managed twice; or a call waits for a thread that has ended. Each overlap is forced, not hoped for.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import weakref

import pytest
import torch
from place import DEVICE
from safetensors.torch import load_file, save_file
from torch import nn

import vram_magic as vm
from vram_magic import registry as registry_module
from vram_magic.models.entry import EntryPoint

pytestmark = pytest.mark.timeout(120)

X = torch.zeros(1, 512, device=DEVICE)


def resident(_):
    return nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512)).to(DEVICE)


def not_resident(tmp_path):
    """A model whose weights are not on the device yet: all of it has entry points as long as that is so."""
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))
    if DEVICE == "cpu":  # mapped from a file, that is
        file = tmp_path / f"{id(model)}.safetensors"
        save_file(model.state_dict(), file)
        model.load_state_dict(load_file(file), assign=True)
    return model


everywhere = pytest.mark.parametrize("build", [resident, not_resident])


def owners(model):
    """The managed models that calls of the module and its children go through."""
    entries = (entry for module in model.modules() for entry in vars(module).values() if isinstance(entry, EntryPoint))
    return {entry._model for entry in entries}


@contextlib.contextmanager
def once(owner, name, job, *, only=""):
    """The job is done once, in the middle: before the owner's method of that name is, for a function called `only`."""
    method = getattr(owner, name)

    def late(*args):
        if not only or getattr(args[0], "__name__", "") == only:
            delattr(owner, name)
            job()
        return method(*args)

    setattr(owner, name, late)
    try:
        yield
    finally:
        vars(owner).pop(name, None)


def before_the_look(mgr, job):
    return once(mgr._core.workers, "decide", job, only="look")


def before_it_is_listed(mgr, job):
    return once(mgr._core.registry, "add", job)


# ------------------------------------------------------------------------------------------------- two registrations


@everywhere
@pytest.mark.parametrize("moment", [before_the_look, before_it_is_listed])
@pytest.mark.parametrize("name", ["model", "another"])
def test_an_object_that_two_register_at_once_is_managed_once(mgr, tmp_path, build, moment, name):
    model, found, in_use = build(tmp_path), [], []
    with moment(mgr, lambda: found.append(mgr.register(name, model))):
        if name == "model":
            assert mgr.register("model", model)._managed is found[0]._managed
        else:
            with pytest.raises(vm.VRAMError, match="managed as 'another' already"):
                mgr.register("model", model)
    assert list(mgr.models) == [name]
    assert owners(model) == {found[0]._managed}
    model[0].register_forward_hook(lambda *_: in_use.append(found[0].in_use))
    model(X)
    assert in_use == [True]
    found[0].forget()
    assert not owners(model)


@everywhere
@pytest.mark.parametrize("moment", [before_the_look, before_it_is_listed])
def test_a_name_that_two_register_at_once_is_the_last_ones(mgr, tmp_path, build, moment):
    first, second = build(tmp_path), build(tmp_path)
    with moment(mgr, lambda: mgr.register("model", first)):
        handle = mgr.register("model", second)
    assert [handle.model for handle in mgr.models.values()] == [second]
    assert not owners(first)
    assert owners(second) == {handle._managed}
    mgr.close()
    assert not owners(second)


def test_a_name_that_is_taken_while_a_load_under_it_fails_keeps_its_new_model(mgr):
    old, meanwhile, new = resident(None), resident(None), resident(None)
    mgr.register("model", old)

    def fail():
        mgr.register("model", meanwhile)
        raise ValueError("no")

    with once(mgr._torch_models, "_made", fail), pytest.raises(ValueError, match="no"):
        mgr.load("model", new)
    assert [handle.model for handle in mgr.models.values()] == [meanwhile]
    assert not owners(old) | owners(new)


# ------------------------------------------------------------------------------------- a call, an interrupt, an end


def test_a_model_that_is_called_while_it_is_registered_has_its_size(mgr):
    model = resident(None)
    with before_the_look(mgr, lambda: model(X)):
        handle = mgr.register("model", model)
    with mgr._core.registry.moving(handle._managed, "loading"):  # nobody looks meanwhile
        assert (handle.total_bytes, handle.device_bytes) == (2 * 4 * 512 * 513,) * 2


@everywhere
def test_a_registration_that_is_interrupted_leaves_the_model_to_its_user(mgr, tmp_path, build):
    def interrupt():
        raise KeyboardInterrupt

    model = build(tmp_path)
    with before_it_is_listed(mgr, interrupt), pytest.raises(KeyboardInterrupt):
        mgr.register("model", model)
    assert not mgr.models
    assert not owners(model)


@everywhere
def test_nothing_is_registered_in_a_manager_that_is_closed_meanwhile(mgr, tmp_path, build):
    model = build(tmp_path)
    with before_it_is_listed(mgr, mgr.close), pytest.raises(vm.VRAMError, match="closed"):
        mgr.register("model", model)
    assert not owners(model)


def test_a_model_that_is_forgotten_while_it_is_registered_is_not_kept(mgr):
    model = resident(None)

    def forget():
        mgr["model"].forget()

    with once(mgr._torch_models, "_install", forget):
        handle = mgr.register("model", model)
    gone = weakref.ref(handle._managed)
    assert not owners(model)
    del handle
    gc.collect()
    assert gone() is None


@everywhere
@pytest.mark.parametrize("end", ["forget", "close"])
def test_a_look_that_comes_too_late_leaves_the_model_to_its_user(mgr, tmp_path, build, end):
    model = build(tmp_path)
    handle = mgr.register("model", model)
    handle.evict()
    with before_the_look(mgr, handle.forget if end == "forget" else mgr.close):
        assert handle.total_bytes
    assert not owners(model)


@pytest.mark.parametrize("late", ["evict", "residency"])
def test_what_comes_after_a_model_is_forgotten_does_not_touch_it(mgr, late):
    model = resident(None)
    handle = mgr.register("model", model)
    where = model[0].weight.data_ptr()
    with once(mgr._core.registry, "moving", handle.forget):
        if late == "evict":
            with pytest.raises(vm.UnknownModelError):
                handle.evict()
        else:
            handle.residency = "disk"
    assert model[0].weight.data_ptr() == where
    assert not owners(model)


# ------------------------------------------------------------------------------------------------------- the end


@everywhere
def test_a_close_that_cannot_forget_a_model_leaves_it_to_its_user_all_the_same(mgr, tmp_path, build):
    def interrupt():
        raise KeyboardInterrupt

    model, other = build(tmp_path), build(tmp_path)
    mgr.register("model", model)
    mgr.register("other", other)
    with once(mgr._core.registry, "moving", interrupt), pytest.raises(KeyboardInterrupt):
        mgr.close()
    assert not owners(model) | owners(other)
    model.to(DEVICE)(X)


def test_what_is_asked_of_a_closed_manager_is_told_and_nobody_waits(mgr):
    model = resident(None)
    handle = mgr.register("model", model)
    mgr.close()
    for ask in (handle.aload, handle.aevict, lambda: mgr.amake_room(1), lambda: mgr.unload_model("model")):
        with pytest.raises(vm.VRAMError):
            asyncio.run(ask())
    with pytest.raises(vm.VRAMError, match="closed"):
        mgr._core.workers.decide(lambda: None).result()


def test_a_load_waits_for_as_long_as_it_takes(mgr, monkeypatch):
    """Every end of a lease is a try: there may be thousands."""
    model, tries, pauses = resident(None), [], []
    handle = mgr.register("model", model)
    handle.evict()
    monkeypatch.setattr(registry_module.time, "sleep", pauses.append)

    def bring(model):
        tries.append(model)
        if len(tries) < 1200:
            mgr._core.registry.notify()
            raise vm.VRAMOutOfMemoryError("", needed_bytes=0, free_bytes=0, budget_bytes=1, holders={})
        decided(model)

    decided = mgr._core.registry._bring
    mgr._core.registry._bring = bring
    handle.load()
    assert len(tries) == 1200
    assert max(pauses) <= 0.2


def test_jobs_that_come_at_the_end_are_all_answered(mgr):
    workers, outcomes = mgr._core.workers, []

    def put():
        outcomes.extend(workers.decide(lambda: 1) for _ in range(500))

    threads = [threading.Thread(target=put) for _ in range(3)]
    for thread in threads:
        thread.start()
    mgr.close()
    for thread in threads:
        thread.join()
    for outcome in outcomes:
        with contextlib.suppress(vm.VRAMError):
            assert outcome.result() == 1
    assert len(outcomes) == 1500
