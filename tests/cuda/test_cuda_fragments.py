"""Freed memory in pieces too small to use: how much has to leave for one large tensor, and what helps.

Layers of 3 MiB of two models lie in turn, as two models that were built together do. One has left; then 100 MiB are
asked for in one piece. Whatever the layout, the call must succeed while enough can leave. The table shows what each
layout costs (`pytest -s`). A pool that lives keeps its memory from everybody else, even when torch is out of memory:
there is nothing that we could give back, so that arm is only shown.
"""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.timeout(200)

EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
ARMS = {
    "as built": ("built", {}),
    "as built, expandable segments": ("built", EXPANDABLE),
    "a pool for each model": ("pools", {}),
    "so, pools let go of": ("loose-pools", {}),
    "after one round trip": ("returned", {}),
    "after one, expandable segments": ("returned", EXPANDABLE),
}


def test_one_large_tensor_fits_whatever_the_layout(run_script):
    told = {}
    print()
    for arm, (layout, options) in ARMS.items():
        told[arm] = run_script("fragments.py", layout, **options).splitlines()[-1]
        print(f"  {arm:32s} {told[arm]}")
    assert all("MiB fit:" in told[arm] for arm, (layout, _) in ARMS.items() if layout != "pools"), told
    assert " 0 MiB more left" in told["after one round trip"]
