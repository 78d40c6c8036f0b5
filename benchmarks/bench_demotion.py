"""A resident denoiser starves a neighbour, or is demoted: how long a frame and the next denoising step take.

A diffusion transformer (DiT) with residency "device" stays on the device between its steps. An autoencoder (VAE) whose
full frame needs more than what is left has then two ways. *Pinned*, the DiT stays: the full frame runs out of memory,
and the VAE decodes in tiles, again and again over their overlaps. *Demoted*, blocks of the DiT leave, since its weight
file backs them: the full frame fits, and the next step reads them back.

Real classes of diffusers, built small with random weights; no download. Both arms are interleaved. Two more cases: one
that does not fit even with all of the DiT out, asked for as a whole, where everything stays as it was; and one without
pressure, beside the same models unmanaged. What must hold is asserted: every step is bit-equal to one that was never
evicted.

Usage: bench_demotion.py [cpu|cuda]
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

import vram_magic as vm

if TYPE_CHECKING:
    from collections.abc import Callable

ROUNDS = 3
MIB = 2**20


@dataclass
class Scene:
    """The two models, and what they work on."""

    device: str
    dit: Any = field(init=False)
    vae: Any = field(init=False)

    def __post_init__(self):
        from diffusers import AutoencoderKL, DiTTransformer2DModel

        torch.manual_seed(0)
        self.dit = DiTTransformer2DModel(
            num_attention_heads=8,
            attention_head_dim=64,
            in_channels=4,
            out_channels=4,
            num_layers=6,
            sample_size=32,
            num_embeds_ada_norm=100,
            norm_type="ada_norm_zero",
        )
        self.vae = AutoencoderKL(
            block_out_channels=(32, 64, 64, 64),
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            latent_channels=4,
            norm_num_groups=16,
            sample_size=128,  # of a tile, too
        )
        for model in (self.dit, self.vae):
            model.eval().requires_grad_(False).to(self.device)
        self.noisy = torch.randn(1, 4, 32, 32, device=self.device)
        self.when = torch.tensor([5], device=self.device)
        self.label = torch.tensor([1], device=self.device)

    def step(self) -> torch.Tensor:
        """One denoising step, at a fixed point."""
        return self.dit(self.noisy, timestep=self.when, class_labels=self.label).sample

    def full_frame(self) -> torch.Tensor:
        self.vae.disable_tiling()
        return self.vae.decode(self.noisy).sample

    def tiles(self) -> torch.Tensor:
        self.vae.enable_tiling()
        return self.vae.decode(self.noisy).sample

    def frame(self) -> tuple[str, torch.Tensor]:
        """What a pipeline does: the full frame if it fits, else tiles."""
        with contextlib.suppress(torch.OutOfMemoryError):
            return "full frame", self.full_frame()
        return "tiles", self.tiles()

    def seconds(self, work: Callable[[], Any]) -> tuple[float, Any]:
        start = time.perf_counter()
        result = work()
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start, result


def peak_over_weights(mgr: vm.VRAMManager, work: Callable[[], Any]) -> int:
    """The bytes that the work holds at most, beyond what is there before."""
    mgr.reset_peak()
    before = mgr.used_bytes
    work()
    return mgr.peak_bytes - before


def without_pressure(scene: Scene, plain: Scene, mgr: vm.VRAMManager) -> None:
    """Managed beside unmanaged, interleaved: nobody leaves, and no time is lost."""
    plain.step(), plain.full_frame()  # the managed ones have warmed up already
    decisions = len(mgr.journal)
    times: dict[str, list[float]] = {"managed": [], "unmanaged": []}
    for _ in range(ROUNDS):
        for name, which in random.sample([("managed", scene), ("unmanaged", plain)], 2):
            times[name].append(which.seconds(lambda which=which: (which.step(), which.full_frame()))[0])
    ratio = min(times["managed"]) / min(times["unmanaged"])
    assert len(mgr.journal) == decisions
    assert mgr["dit"].state == "device"
    print(f"without pressure: step and full frame {min(times['managed']):.2f} s, {ratio:.2f} of unmanaged; nobody left")


def under_pressure(scene: Scene, mgr: vm.VRAMManager) -> None:
    """Pinned against demoted: a frame, then the next step."""
    dit, never_evicted = mgr["dit"], scene.step()
    times: dict[str, list[tuple[float, float]]] = {"pinned": [], "demoted": []}
    frames = {}
    for _ in range(ROUNDS):
        for arm, taken in times.items():
            dit.load()
            dit.residency = "device"  # after a demotion, too
            (dit.pin if arm == "pinned" else dit.unpin)()
            decoding, (how, frames[arm]) = scene.seconds(scene.frame)
            assert how == ("tiles" if arm == "pinned" else "full frame")
            assert dit.residency == ("device" if arm == "pinned" else "disk")
            left_bytes, decision = dit.total_bytes - dit.device_bytes, mgr.journal[-1]
            stepping, after = scene.seconds(scene.step)
            assert torch.equal(after, never_evicted)
            taken.append((decoding, stepping))
            del after
    print(f"demoted: {left_bytes / MIB:.0f} MiB of the DiT left for the full frame; the last decision:")
    print(f"  {decision}")
    _print_arms(times)
    seam = (frames["pinned"] - frames["demoted"]).abs().max() / frames["demoted"].abs().max()
    print(f"tiles differ from the full frame by up to {seam:.1%} of its range; each next step was bit-equal")


def _print_arms(times: dict[str, list[tuple[float, float]]]) -> None:
    totals = {}
    for arm, taken in times.items():
        decoding, stepping = (statistics.median(part) for part in zip(*taken, strict=True))
        totals[arm] = decoding + stepping
        how = "full frame" if arm == "demoted" else "tiles, after a full frame failed"
        print(f"{arm:>8}: frame {decoding:.2f} s ({how}) + next step {stepping:.2f} s = {totals[arm]:.2f} s")
    print(f"   ratio: pinned takes {totals['pinned'] / totals['demoted']:.2f} times as long as demoted")


def too_large(scene: Scene, mgr: vm.VRAMManager, never_evicted: torch.Tensor) -> None:
    """All or nothing: a need that the whole DiT would not meet takes nothing of it, and tiles are used."""
    dit = mgr["dit"]
    dit.load()
    dit.residency = "device"
    before = dit.state, dit.residency, dit.device_bytes
    need_bytes = mgr.free_bytes + dit.total_bytes + mgr["vae"].total_bytes + MIB
    try:
        with mgr["vae"].lease(), mgr.reserve(need_bytes):
            raise AssertionError("the whole device is smaller than this")
    except vm.VRAMOutOfMemoryError:
        refused = mgr.journal[-1]
    seconds, _ = scene.seconds(scene.tiles)
    assert not refused.left
    assert (dit.state, dit.residency, dit.device_bytes) == before
    assert torch.equal(scene.step(), never_evicted)
    print(f"too large: tiles in {seconds:.2f} s; the DiT as before: {dit.state}, {dit.device_bytes / MIB:.0f} MiB")
    print(f"  {refused}")


@torch.no_grad()
def main() -> None:
    """Tells the story on the device that is asked for."""
    if importlib.util.find_spec("diffusers") is None:
        print("diffusers is not installed, so there is no story to tell")
        return
    logging.disable(logging.WARNING)  # of optional libraries that diffusers does not find
    device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    scene, plain = Scene(device), Scene(device)
    with tempfile.TemporaryDirectory() as folder, vm.VRAMManager(device, budget="4GiB", block_bytes="16MiB") as mgr:
        scene.dit.save_pretrained(folder)
        dit = mgr.register("dit", scene.dit, residency="device", source=folder)
        vae = mgr.register("vae", scene.vae)
        sizes = f"DiT {dit.total_bytes / MIB:.0f} MiB, VAE {vae.total_bytes / MIB:.0f} MiB"
        never_evicted = scene.step()
        tiles, full = (peak_over_weights(mgr, work) for work in (scene.tiles, scene.full_frame))
        print(f"{sizes}; a full frame needs {full / MIB:.0f} MiB more, tiles {tiles / MIB:.0f} MiB")
        without_pressure(scene, plain, mgr)
        del plain
        left = tiles + (full - tiles) // 4
        mgr.budget_bytes = mgr.used_bytes + left
        print(f"under pressure: {left / MIB:.0f} MiB left beside both")
        under_pressure(scene, mgr)
        too_large(scene, mgr, never_evicted)


if __name__ == "__main__":
    main()
