"""What the live panel costs: messages and bytes to the browser, and the kernel's time for a refresh.

Ten models of fifty blocks; bytes are those of the messages' JSON, as a kernel packs it. The time of a refresh is
printed beside that of the text report from the same cached figures: the ratio holds on any machine. Then it is printed
as the share of one core that four looks a second take, while something changes at every look and while nothing does.
"""

from __future__ import annotations

import time
from statistics import median

import comm
import torch
from jupyter_client.session import Session

import vram_magic as vm
from vram_magic.notebook import panel
from vram_magic.notebook.report import Report

NAMES = ["llm", "tts", "asr", "draft", "embedder", "reranker", "whisper", "vocoder", "vision", "sdxl"]
BLOCKS, ROUNDS, LOOKS_A_SECOND = 50, 200, 4

sent: list[int] = []


class Wire(comm.DummyComm):
    """A channel to nowhere that weighs what goes through it."""

    def publish_msg(self, msg_type, data=None, metadata=None, buffers=None, **keys):
        del msg_type, metadata
        content = {"comm_id": self.comm_id, "data": data or {}, **keys}
        sent.append(len(Session().pack(content)) + sum(map(len, buffers or [])))


def weigh(what, work):
    """Prints how many messages the work sends, and their bytes."""
    sent.clear()
    work()
    print(f"{what}: {len(sent)} messages, {sum(sent)} bytes")


def median_us(work, prepare=lambda: None):
    """The median of many runs, in microseconds; what is prepared before each does not count."""
    times = []
    for _ in range(ROUNDS):
        prepare()
        start = time.perf_counter()
        work()
        times.append((time.perf_counter() - start) * 1e6)
    return median(times)


def model_of_many_blocks():
    """Layers of 4 KiB, each a block of its own."""
    return torch.nn.Sequential(*[torch.nn.Linear(32, 32, bias=False) for _ in range(BLOCKS)])


def main() -> None:
    """Prints all figures."""
    comm.create_comm = Wire
    manager = vm.VRAMManager(device="cpu", budget="1GiB", block_bytes="4KiB")
    models = {name: model_of_many_blocks() for name in NAMES}
    for name, model in models.items():
        manager.register(name, model)
    assert all(handle.blocks == (BLOCKS, BLOCKS) for handle in manager.models.values())
    weigh("to open", manager.panel)
    shown = panel._panel  # noqa: SLF001  it is driven by hand here
    shown._ended.set()  # noqa: SLF001  its own thread would send in between
    time.sleep(0.5)
    weigh(f"{ROUNDS} looks while nothing changes", lambda: [shown.refresh() for _ in range(ROUNDS)])
    manager["sdxl"].pin()
    weigh("a refresh", shown.refresh)
    manager["tts"].evict()
    weigh("a refresh with an eviction", shown.refresh)
    idle, report = median_us(shown.refresh), median_us(lambda: repr(Report.of(manager)))
    print(f"a look without a change: {idle:.0f} us, {idle / report:.2f} times the text report")

    def change():
        handle = manager["llm"]
        handle.unpin() if handle.pinned else handle.pin()

    busy = median_us(shown.refresh, change)
    print(f"a refresh: {busy:.0f} us, {busy / report:.2f} times the text report")
    for what, us in (("nothing changes", idle), ("something changes at every look", busy)):
        print(f"share of one core while {what}: {us * LOOKS_A_SECOND / 1e6:.2%}")
    panel.close_panel()
    manager.close()


if __name__ == "__main__":
    main()
