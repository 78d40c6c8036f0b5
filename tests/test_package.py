"""The package's surface: what it exports, and that importing it is light.

Without this a stray import at the top of a module would cost every notebook two seconds, and every machine without a
card an error.
"""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest
from place import DEVICE

import vram_magic as vm


def test_all_exported_names_exist_and_are_sorted():
    assert vm.__all__ == sorted(vm.__all__)
    for name in vm.__all__:
        assert getattr(vm, name).__name__ == name


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        vm.nonsense  # noqa: B018


@pytest.mark.parametrize("code", ["import vram_magic", "import vram_magic; vram_magic.VRAMError; vram_magic.Journal"])
def test_importing_is_light(code):
    heavy = "torch", "pynvml", "ipywidgets", "anywidget", "accelerate", "transformers", "IPython"
    check = f"import sys; {code}; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_errors_derive_from_what_a_user_would_catch():
    import torch

    assert issubclass(vm.VRAMOutOfMemoryError, torch.OutOfMemoryError)
    assert issubclass(vm.UnknownModelError, KeyError)
    assert issubclass(vm.SourceError, ValueError)
    assert issubclass(vm.BackingLostError, OSError)
    assert issubclass(vm.ModelInUseError, RuntimeError)
    assert str(vm.UnknownModelError("two\nlines")) == "two\nlines"


def test_the_manager_survives_a_reload_of_the_package():
    first = vm.manager()
    try:
        importlib.reload(vm)
        assert vm.manager() is first
    finally:
        first.close()


def test_a_device_has_one_open_manager():
    mgr = vm.VRAMManager(device=DEVICE, budget="1GiB")
    try:
        with pytest.raises(vm.VRAMError, match="has a manager already"):
            vm.VRAMManager(device=DEVICE)
        assert vm.manager() is mgr
    finally:
        mgr.close()
    vm.VRAMManager(device=DEVICE).close()


def test_ledgers_are_many_and_hold_no_torch_models():
    import torch

    first, second = vm.VRAMManager(total_vram_gb=1.0), vm.VRAMManager(total_vram_gb=2.0)
    assert (first.available_vram_gb, second.available_vram_gb) == (1.0, 2.0)
    with pytest.raises(vm.VRAMError, match="holds no torch models"):
        first.register("llm", torch.nn.Linear(2, 2))
    first.close()
    second.close()


def test_a_closed_manager_says_so():
    mgr = vm.VRAMManager(total_vram_gb=1.0)
    mgr.close()
    mgr.close()
    with pytest.raises(vm.VRAMError, match="is closed"):
        mgr.make_room("1MiB")


@pytest.mark.parametrize("bad", [{"budget": "plenty"}, {"budget": "1GiB", "block_bytes": "-1"}, {"device": "toaster"}])
def test_a_bad_argument_changes_nothing(bad):
    with pytest.raises((ValueError, vm.VRAMError)):
        vm.VRAMManager(**bad)
    vm.VRAMManager(device=DEVICE).close()
