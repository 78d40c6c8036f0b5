"""Freed memory in pieces too small to use: how much has to leave for one large tensor, and what helps.

Layers of 3 MiB of two models lie in turn, as two models that were built together do. Then 30 MiB are asked for in one
piece. Whatever the layout, the call must succeed while enough can leave; the table shows what each layout costs
(`pytest -s`).
"""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.timeout(150)

ARMS = {
    "as built": ("built", ""),
    "after one round trip": ("returned", ""),
    "as built, expandable segments": ("built", "expandable_segments:True"),
}


def test_one_large_tensor_fits_whatever_the_layout(run_script, capsys):
    lines = {}
    for arm, (layout, options) in ARMS.items():
        lines[arm] = run_script("fragments.py", layout, PYTORCH_CUDA_ALLOC_CONF=options).splitlines()[-1]
    with capsys.disabled():
        print()
        for arm, line in lines.items():
            print(f"  {arm:32s} {line}")
    assert all("fits" in line for line in lines.values())
