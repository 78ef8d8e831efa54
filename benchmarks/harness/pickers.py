"""A picker in a real kernel, pressed as a front end does: by a message to a widget.

benchmark ── comm_msg: this button is on ──► kernel: busy ... widgets' new values ... idle
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

from jupyter_client.manager import KernelManager
from typing_extensions import Self

WAIT_S = 120.0
# Llama-2-7B's shape, without memory: what the "7B-parameter meta model" is for a user.
# The machine is described: with two GPUs there are more ways to train than on a CPU.
SHOW = """
import json, time, torch
from transformers import LlamaConfig, LlamaForCausalLM
from nbaccel.notebook.pickers import Picker
from nbaccel.plan import Gpu, Inventory
with torch.device("meta"):
    model = LlamaForCausalLM(LlamaConfig())
batch = {"input_ids": torch.zeros(1, 512, dtype=torch.long)}
gpus = tuple(
    Gpu(index=number, name="NVIDIA H100", total_bytes=80 * 2**30, free_bytes=78 * 2**30,
        compute_capability=(9, 0), uuid=f"GPU-{number}")
    for number in range(2)
)
machine = Inventory(
    cpu_cores=32, host_total_bytes=256 * 2**30, host_available_bytes=200 * 2**30, gpus=gpus,
    torch_version="2.13.0+cu130",
)
begun = time.perf_counter()
picker = Picker(model=model, sample_batch=batch, inventory=machine)
picker.show()
shown_s = time.perf_counter() - begun
"""
BUTTONS = """
def below(widget):
    for child in getattr(widget, "children", ()):
        yield child
        yield from below(child)

found = {}
root = picker._live_view().root
for setting in below(root):
    names = [c.removeprefix("nbaccel-") for c in setting._dom_classes]
    if "setting" in names:
        for widget in below(setting):
            for c in widget._dom_classes:
                if c.startswith("nbaccel-option-"):
                    found[f"{names[-1]} {c.removeprefix('nbaccel-option-')}"] = widget.model_id
for widget in below(root):
    if "nbaccel-candidates" in widget._dom_classes:
        for button in widget.children:
            if "nbaccel-hidden" not in button._dom_classes:
                found[f"candidates {button.description}"] = button.model_id
print(json.dumps({
    "buttons": found,
    "widgets": sum(1 for _ in below(root)) + 1,
    "parameters": sum(p.numel() for p in model.parameters()),
    "shown_s": shown_s,
}))
"""


@dataclass(frozen=True)
class Took:
    kernel_ms: float
    """From the message's arrival to the last one sent, by the kernel's clock."""
    client_ms: float
    """From sending it to having them all."""
    num_messages: int
    num_bytes: int


class Form:
    """The picker; a context manager, which ends the kernel."""

    def __init__(self) -> None:
        self.manager = KernelManager()
        self.client: Any = None

    def __enter__(self) -> Self:
        self.manager.start_kernel()
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=WAIT_S)
        self._run(SHOW)
        facts = json.loads(self._run(BUTTONS))
        self._buttons: dict[str, str] = facts["buttons"]
        self.num_widgets: int = facts["widgets"]
        self.num_parameters: int = facts["parameters"]
        self.shown_s: float = facts["shown_s"]
        return self

    def __exit__(self, *_: object) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)

    def press(self, setting: str, option: str, *, is_on: bool = True) -> Took:
        """Press a button; returns when all that follows has come."""
        content = {
            "comm_id": self._buttons[f"{setting} {option}"],
            "data": {"method": "update", "state": {"value": is_on}, "buffer_paths": []},
        }
        begun = time.perf_counter()
        message = self.client.session.msg("comm_msg", content)
        self.client.shell_channel.send(message)
        answers = self._until_idle(message["header"]["msg_id"])
        client_ms = (time.perf_counter() - begun) * 1000
        states = {m["content"]["execution_state"]: m for m in answers if m["msg_type"] == "status"}
        took = states["idle"]["header"]["date"] - states["busy"]["header"]["date"]
        sent = [m for m in answers if m["msg_type"] == "comm_msg"]
        # The table beside it is renewed a moment later: not in the middle of the next one.
        self._run("import asyncio; await asyncio.sleep(0.5)")
        if setting == "precisions":  # the buttons of ways stand for others now
            self._buttons = json.loads(self._run(BUTTONS))["buttons"]
        size = sum(len(json.dumps(m["content"])) for m in sent)
        return Took(took.total_seconds() * 1000, client_ms, len(sent), size)

    def _run(self, code: str) -> str:
        request = self.client.execute(code)
        answers = self._until_idle(request)
        for answer in answers:
            if answer["msg_type"] == "error":
                raise RuntimeError("\n".join(answer["content"]["traceback"]))
        self.client.get_shell_msg(timeout=WAIT_S)
        return "".join(a["content"]["text"] for a in answers if a["msg_type"] == "stream")

    def _until_idle(self, request: str) -> list[dict[str, Any]]:
        """All that the kernel publishes because of a request."""
        found: list[dict[str, Any]] = []
        while True:
            message = self.client.get_iopub_msg(timeout=WAIT_S)
            if message["parent_header"].get("msg_id") == request:
                found.append(message)
                if message["content"].get("execution_state") == "idle":
                    return found
