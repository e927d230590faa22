"""ComfyUI itself, started without a screen on the CPU: `LORA_MERGE_COMFYUI="PYTHON PATH/main.py"` names it."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.kit.comfy import KINDS
from tests.kit.command_line import run

COMMAND = shlex.split(os.environ.get("LORA_MERGE_COMFYUI", ""))


class Server:
    """A running ComfyUI."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.address = folder, f"http://127.0.0.1:{port}"

    def answers(self) -> bool:
        """Whether it has started."""
        try:
            return bool(self.get("/system_stats"))
        except (urllib.error.URLError, ConnectionError):
            return False

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.address + path, timeout=60) as answer:
            return json.load(answer)

    def send(self, path: str, content: Any) -> Any:
        request = urllib.request.Request(self.address + path, json.dumps(content).encode())
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read() or "{}")

    def post(self, workflow: Any) -> tuple[str, dict[str, Any]]:
        """The status of a workflow that has ended, and the text of each node; the names of nodes that ran."""
        number = self.send("/prompt", {"prompt": workflow})["prompt_id"]
        return self.ended(number)

    def ended(self, number: str) -> tuple[str, dict[str, Any]]:
        for _ in range(1200):
            if number in (history := self.get(f"/history/{number}")):
                entry = history[number]
                texts = {name: out["text"][0] for name, out in entry["outputs"].items() if "text" in out}
                pictures = {f"picture {name}": out.get("images", []) for name, out in entry["outputs"].items()}
                return entry["status"]["status_str"], {**texts, **pictures, "messages": entry["status"]["messages"]}
            time.sleep(0.1)
        raise AssertionError("the workflow did not end")


def installed(folder: Path) -> None:
    """Write the folders of ComfyUI, with the pack in `custom_nodes`."""
    for name in (*(f"models/{kind}" for kind in KINDS), "custom_nodes", "input", "output", "temp", "user"):
        (folder / name).mkdir(parents=True)
    assert run("comfyui", "install", folder).code == 0


@contextmanager
def running(folder: Path, *arguments: str) -> Iterator[Server]:
    """ComfyUI with these folders, and more words for its command line."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [*COMMAND, "--cpu", "--port", str(port), "--base-directory", str(folder), "--disable-auto-launch"]
    with (folder / "log.txt").open("wb") as log:
        process = subprocess.Popen([*command, *arguments], stdout=log, stderr=log, cwd=Path(COMMAND[-1]).parent)
    it = Server(folder, port)
    try:
        while not it.answers():
            assert process.poll() is None, (folder / "log.txt").read_text()
            time.sleep(0.2)
        yield it
    finally:
        process.terminate()
        process.wait(30)
