"""The picture of a terminal in the README: `python -m tests.kit.picture` makes it from a real merge of full-size files.

The files have the shapes of Stable Diffusion 1.5 and random values, 2.1 GB in a temporary folder."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text
from safetensors.torch import load_file, save_file

from tests.bench import inputs
from tests.kit.adapters import kohya
from tests.kit.files import save
from tests.kit.models import sd1
from tests.kit.readme import ROOT

PICTURE: Final = ROOT / "configs" / "site" / "pages" / "terminal.svg"
COMMAND: Final = "lora-merge sd15.safetensors ink.safetensors:0.8 detail.safetensors:0.5,te=0 -o styled.safetensors"
COLUMNS: Final = 100
METADATA: Final = {"ss_base_model_version": "sd_v1", "ss_network_module": "networks.lora", "modelspec.trigger_phrase": "inkstyle", "ss_tag_frequency": '{"1_ink": {"inkstyle": 24}}'}  # fmt: skip


def files(folder: Path, *, full: bool) -> None:
    """Write the base and two adapters: full-size ones, or those of the tests."""
    for n, name in enumerate(("sd15", "ink", "detail")):
        path = folder / f"{name}.safetensors"
        if not full:
            save(kohya(sd1(), seed=n) if n else sd1(), path, METADATA if n else {})
        elif n:
            tensors = load_file(inputs.adapter(path, "sd1", seed=n))
            save_file({key: t * 0.5 if key.endswith("up.weight") else t for key, t in tensors.items()}, path, METADATA)
        else:
            inputs.base(path, "sd1")


def screen(folder: Path) -> str:
    """What the command prints on a terminal, with its colours."""
    words = [sys.executable, "-m", "lora_merge", *shlex.split(COMMAND)[1:], "--color", "always"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=True,
                          env={**os.environ, "COLUMNS": str(COLUMNS), "NO_COLOR": ""})  # fmt: skip
    return done.stdout


def drawn(output: str) -> str:
    """The picture of a terminal with this output; it loads no font from another server."""
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere, force_terminal=True, highlight=False)
        console.print(Text.assemble(("$ ", "bold green"), COMMAND))
        console.print(Text.from_ansi(output.rstrip()))
        svg = console.export_svg(title="lora-merge", theme=MONOKAI, unique_id="terminal")
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    return svg.replace("Fira Code, monospace", "'Fira Code', Consolas, Menlo, 'DejaVu Sans Mono', monospace")


def words_of(text: str) -> set[str]:
    """The words of an output or of a picture, without what differs from run to run: numbers, units, paths."""
    text = re.sub(r"<style>.*?</style>|<[^>]*>|\x1b\[[0-9;]*m|&#\d+;", " ", text, flags=re.DOTALL)
    text = re.sub(r"\S*_\S*", " ", text)
    return {word for word in re.findall(r"[a-z][a-z-]{2,}", text) if word not in ("mib", "gib", "kib")}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        files(Path(temporary), full=True)
        PICTURE.write_text(drawn(screen(Path(temporary))), encoding="utf-8")
    print(f"wrote {PICTURE}")
