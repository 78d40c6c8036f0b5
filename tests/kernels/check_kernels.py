"""The panel under several releases of ipykernel, which treat messages in the middle of a cell differently.

Without this, a click may be lost, done twice, or disturb the cell on a kernel that others use: ipykernel 6 and 7.4 hear
it after the cell, 7.0 to 7.3 in a thread of their own while it runs. Each release is put into a folder under build/,
found before the environment's own, so nothing else is installed again: ``make test-kernels``. Prints a line for each
release; fails when one differs from what it should do.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from queue import Empty

from jupyter_client.manager import start_new_kernel

REPOSITORY = Path(__file__).parents[2]
FOLDERS = REPOSITORY / "build" / "kernels"
RELEASES = {"ipykernel 6.31": "ipykernel==6.31.0", "ipykernel 7.3": "ipykernel==7.3.0", "ipykernel newest": "ipykernel"}
MIB = 2**20
OPEN = """\
%load_ext vram_magic
import time, torch, ipykernel
from torch import nn
import vram_magic as vm
%vram budget 64MiB
net = nn.Linear(512, 512, bias=False)
h = vm.manager().register("net", net)
%vram panel"""
BUSY = "h.evict(); time.sleep(3)"
TELL = "print(ipykernel.__version__, h.device_bytes)"
WAIT_S = 60


class Kernel:
    """A kernel of one release, and all that it sent to the browser."""

    def __init__(self, folder: Path) -> None:
        path = os.pathsep.join([str(folder), str(REPOSITORY)])
        self.manager, self.client = start_new_kernel(180, kernel_name="python3", env=os.environ | {"PYTHONPATH": path})
        self.messages = []

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)

    def hear(self, condition, what):
        """Reads messages until one fits."""
        end = time.monotonic() + WAIT_S
        while time.monotonic() < end:
            try:
                message = self.client.get_iopub_msg(timeout=1)
            except Empty:
                continue
            self.messages.append(message)
            if condition(message):
                return message
        raise AssertionError(f"it did not come: {what}")

    def ended(self, number):
        """Reads until the cell has ended."""
        return self.hear(
            lambda m: m["parent_header"].get("msg_id") == number and m["content"].get("execution_state") == "idle",
            "idle",
        )

    def printed(self):
        """What was printed so far, by any cell and by nobody."""
        return "".join(m["content"]["text"] for m in self.messages if m["msg_type"] == "stream")

    def subshell(self):
        """A thread that hears messages while a cell runs, as JupyterLab asks for; None where the kernel has none."""
        about = self.client.kernel_info(reply=True, timeout=WAIT_S)["content"]
        if "kernel subshells" not in about.get("supported_features", []):
            return None
        self.client.control_channel.send(self.client.session.msg("create_subshell_request"))
        while True:
            reply = self.client.get_control_msg(timeout=WAIT_S)
            if reply["msg_type"] == "create_subshell_reply":
                return reply["content"]["subshell_id"]

    def click(self, comm_id, subshell, **request):
        """What a button sends."""
        data = {"method": "custom", "content": request}
        message = self.client.session.msg("comm_msg", {"comm_id": comm_id, "data": data})
        if subshell is not None:
            message["header"]["subshell_id"] = subshell
        self.client.shell_channel.send(message)


def traits(message):
    """The traits that a message to the widget carries."""
    return message["content"].get("data", {}).get("state", {}) if message["msg_type"] == "comm_msg" else {}


def check(kernel: Kernel) -> str:
    """One release's words for what it did."""
    kernel.ended(kernel.client.execute(OPEN))
    opened = [m["content"] for m in kernel.messages if m["msg_type"] == "comm_open"]
    (comm_id,) = [content["comm_id"] for content in opened if "_esm" in content["data"]["state"]]
    subshell = kernel.subshell()
    before = len(kernel.messages)
    cell = kernel.client.execute(BUSY)
    kernel.hear(lambda m: any(row[4:5] == [0] for row in traits(m).get("state", {}).get("models", [])), "the eviction")
    for _ in range(2):
        kernel.click(comm_id, subshell, kind="load", name="net", value="", id=1)
    kernel.ended(cell)
    heard = "while the cell ran" if any(traits(m).get("notice") for m in kernel.messages) else "after the cell"
    kernel.click(comm_id, subshell, kind="pin", name="net", value="", id=2)
    kernel.hear(lambda m: 2 in traits(m).get("notice", {}).get("ids", []), "the answer to the second click")
    kernel.ended(kernel.client.execute(TELL))
    answers = [number for m in kernel.messages for number in traits(m).get("notice", {}).get("ids", [])]
    assert answers == [1, 2], answers
    refreshes = sum(bool(traits(m)) for m in kernel.messages[before:])
    version, size = kernel.printed().removeprefix("budget 64.0 MiB\n").split()  # and nothing else was printed
    assert int(size) == MIB, size
    assert not [m for m in kernel.messages if m["msg_type"] == "error"]
    return f"{version}: a click in a busy cell is done once, {heard}; {refreshes} messages"


def main() -> None:
    """Checks every release."""
    failed = 0
    for name, requirement in RELEASES.items():
        folder = FOLDERS / name.replace(" ", "-")
        if not folder.exists():
            command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), requirement]
            subprocess.run(command, check=True)
        kernel = Kernel(folder)
        try:
            print(f"{name}: {check(kernel)}")
        except (AssertionError, ValueError) as error:
            failed += 1
            print(f"{name}: FAILED: {error!r}; it printed: {kernel.printed()!r}")
        finally:
            kernel.close()
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
