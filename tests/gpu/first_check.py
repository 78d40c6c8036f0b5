"""What to run first on a real CUDA card: whether all holds there that was proven on a stand-in runtime.

Takes less than two minutes and a few GB of the card, for moments all of it: nothing else should need it meanwhile. Uses
the public interface only. Ends with one table; the exit code is the number of failures. On a failure send the whole
output to the developers.

    python tests/gpu/first_check.py [PART OF A CHECK'S NAME...]

It is rehearsed without a card, where checks that need real kernels tell SKIP:

    .venv-cuda/bin/python tests/cuda/standin.py .venv-cuda/bin/python tests/gpu/first_check.py
"""

from __future__ import annotations

import faulthandler
import gc
import os
import platform
import sys
import time
import traceback

import torch
from card import REHEARSAL, Skipped
from checks import CHECKS

import vram_magic as vm

TIME_LIMIT = 240  # seconds; a hang prints the stacks of all threads


def run(name: str) -> tuple[str, str]:
    """The result of a check, and what it told."""
    try:
        return "PASS", CHECKS[name]()
    except Skipped as reason:
        return "SKIP", str(reason)
    except Exception as error:
        print(f"\n--- {name}")
        traceback.print_exc(file=sys.stdout)
        return "FAIL", f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    finally:
        gc.collect()
        torch.cuda.empty_cache()


def print_machine() -> None:
    properties = torch.cuda.get_device_properties(0)
    capability = f"{properties.major}.{properties.minor}"
    print(f"vram_magic {vm.__version__}, torch {torch.__version__} (CUDA {torch.version.cuda}), {platform.platform()}")
    print(f"Python {platform.python_version()}, {properties.name}, compute capability {capability}")
    print(f"PYTORCH_CUDA_ALLOC_CONF={os.environ.get('PYTORCH_CUDA_ALLOC_CONF', '')}")
    print(torch.cuda.get_allocator_backend(), "allocator;", "on the stand-in" if REHEARSAL else "on a card")


def main(wanted: list[str]) -> int:
    if not torch.cuda.is_available():
        print(f"torch {torch.__version__} finds no CUDA device here.")
        return 1
    faulthandler.dump_traceback_later(TIME_LIMIT, exit=True)
    print_machine()
    start = time.perf_counter()
    names = [name for name in CHECKS if not wanted or any(part in name for part in wanted)]
    results = {name: run(name) for name in names}
    print()
    for name, (result, told) in results.items():
        print(f"{result}  {name:18} {told}")
    failures = sum(result == "FAIL" for result, _ in results.values())
    print(f"\n{len(results)} checks, {failures} failed, {time.perf_counter() - start:.0f} s.")
    if failures:
        print("Please send all of this output to the developers, with how the card is used otherwise.")
    return failures


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
