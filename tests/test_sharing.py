"""Two models over one encoder: its bytes are counted once, and it leaves only when both allow it.

Without this an eviction of one pipeline takes the text encoder from under another that is running.
"""

from __future__ import annotations

import pytest
import torch
from place import DEVICE
from torch import nn

MIB = 1 << 20


def layer() -> nn.Linear:
    return nn.Linear(512, 512, bias=False, device=DEVICE)  # 1 MiB


@pytest.fixture
def pair(mgr) -> tuple[nn.Module, nn.Module]:
    """Two models of 2 MiB each, 3 MiB together."""
    mgr.before = mgr.used_bytes
    encoder = layer()
    first, second = nn.Sequential(encoder, layer()), nn.Sequential(encoder, layer())
    mgr.register("first", first, tier="llm")
    mgr.register("second", second, tier="asr")
    return first, second


def test_shared_bytes_are_counted_once(mgr, pair):
    assert mgr.used_bytes - mgr.before == 3 * MIB
    assert mgr["first"].total_bytes == mgr["second"].total_bytes == 2 * MIB


def test_the_other_model_runs_right_after_one_was_evicted(mgr, pair):
    first, second = pair
    x = torch.randn(2, 512, device=DEVICE)
    with torch.no_grad():
        expected = first(x), second(x)
        assert mgr["first"].evict() == 2 * MIB
        assert mgr.used_bytes - mgr.before == MIB + x.nbytes + 2 * expected[0].nbytes
        assert torch.equal(second(x), expected[1])
        assert mgr["second"].state == "device"
        assert torch.equal(first(x), expected[0])
    assert first[0].weight is second[0].weight


def test_a_shared_block_stays_while_another_owner_uses_it(mgr, pair):
    with mgr["second"].lease():
        assert mgr["first"].evict() == MIB
        assert mgr["second"].state == "device"
        assert "shared with second, which is in use" in mgr["first"].why()


def test_a_shared_block_has_the_rank_of_its_highest_owner(mgr, pair):
    steps = [(step.model, step.bytes) for step in mgr.plan(mgr.free_bytes + 2 * MIB).steps]
    assert steps == [("first", MIB), ("second", MIB)]  # the encoder is second's, and leaves last: from its tail first


def test_an_edit_through_one_owner_is_seen_by_the_other(mgr, pair):
    first, second = pair
    mgr["first"].evict()
    with torch.no_grad():
        second[0].weight.fill_(3)
    mgr["second"].load()
    mgr["first"].load()
    assert torch.all(first[0].weight == 3)


def test_the_one_that_is_left_keeps_the_shared_weights(mgr, pair):
    del pair
    first = mgr["first"].model
    mgr["second"].evict()
    mgr["second"].forget()
    mgr["first"].load()
    assert mgr["first"].state == "device"
    assert first[0].weight.isfinite().all()
