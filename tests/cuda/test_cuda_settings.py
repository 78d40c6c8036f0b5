"""The guard works with each setting of torch's allocator, in both of its ways, and wherever in a process it begins.

Such settings hold from the start of a process, so each case has one of its own.
"""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.timeout(150)

NATIVE, FORWARDING = "native", "native, forwarding"
ALLOCATORS = {
    "as it comes": {},
    "expandable segments": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    "the driver's pool": {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"},
    "rounded to powers": {"PYTORCH_CUDA_ALLOC_CONF": "roundup_power2_divisions:4"},
}


@pytest.mark.parametrize("way", [NATIVE, FORWARDING])
@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_room_is_made_with_each_allocator_in_each_way(run_script, allocator, way):
    forced = {"VRAM_MAGIC_GUARD": "forwarding"} if way == FORWARDING else {}
    assert run_script("scenario.py", **ALLOCATORS[allocator], **forced).splitlines()[-1] == way


def test_a_manager_that_is_opened_after_cuda_was_used_covers_older_tensors(run_script):
    assert run_script("scenario.py", "early").splitlines()[-1] == NATIVE


def test_the_first_check_of_a_card_can_be_rehearsed(run_script):
    parts = ("driver", "guard", "refused", "values", "hot path", "graph", "speed", "fragmentation")
    table = run_script("../gpu/first_check.py", *parts)
    assert "FAIL" not in table
    assert table.count("PASS") == len(parts) - 1
    assert table.count("SKIP ") == 1


def test_evictions_by_the_thousand_under_six_threads(run_script):
    told = run_script("many_evictions.py", 1000)
    assert "evictions in 6 threads" in told
    assert int(told.split()[0]) >= 1000
