"""Takes the pictures of the documentation: python -m tests.ui. The models are headers of full size without their data."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from tests.kit.browser import Window, window
from tests.kit.hollow import hollow
from tests.kit.page_server import serving

ROOT: Final = Path(__file__).parents[2]
PICTURES: Final = ROOT / "configs/site/pages"
SIZE: Final = (1060, 900)
PLAIN: Final = """
for (const e of document.querySelectorAll("body *")) for (const n of e.childNodes)
  if (n.nodeType === 3) n.textContent = n.textContent.replaceAll(arguments[0], "~");
"""
"""Shows the home folder in place of a temporary one."""


def models(folder: Path) -> None:
    """Write SDXL and adapters for it into folders of ComfyUI, without data."""
    for kind in ("checkpoints", "loras"):
        (folder / "models" / kind).mkdir(parents=True)
    table = json.loads(gzip.decompress((ROOT / "tests/headers/single-file/sdxl.json.gz").read_bytes()))
    shapes = {name: tuple(row["shape"] if isinstance(row, dict) else row) for name, row in table.items()}
    hollow(shapes, folder / "models/checkpoints/sdxl.safetensors")
    unet, modules = "model.diffusion_model.", dict[str, tuple[int, ...]]()
    for key, shape in shapes.items():
        if key.startswith(unet) and key.endswith(".weight") and len(shape) == 2 and ("attn" in key or "ff" in key):
            name = "lora_unet_" + key.removeprefix(unet).removesuffix(".weight").replace(".", "_")
            modules |= {f"{name}.lora_up.weight": (shape[0], 32), f"{name}.lora_down.weight": (32, shape[1])}
    for name in ("ink", "detail"):
        hollow(modules, folder / f"models/loras/{name}.safetensors", {"modelspec.trigger_phrase": f"{name} style"})


def fill(w: Window) -> None:
    """Choose a base, two adapters with their strengths, and a method."""
    w.open()
    w.choose("#fields .field select", "sdxl")
    w.js("$('#add').click()")
    w.choose("fieldset select", "ink")
    w.choose("fieldset ~ fieldset select", "detail")
    w.until("$('#plan').dataset.state === 'ready' && $('fieldset details')")
    w.js("const n = $('fieldset .slider input[type=number]'); n.value = 0.8; n.dispatchEvent(new Event('input'))")
    w.js("$('fieldset details').open = true")
    w.until("$('#plan').dataset.state === 'ready'")


def main() -> None:
    """Take them in light and in dark."""
    with TemporaryDirectory() as home:
        models(Path(home) / "ComfyUI")
        with serving(Path(home) / "ComfyUI") as page:
            for scheme in ("light", "dark"):
                with window(page.address, *SIZE, dark=scheme == "dark") as w:
                    fill(w)
                    w.js(PLAIN, home)
                    w.driver.save_screenshot(str(PICTURES / f"ui-{scheme}.png"))


if __name__ == "__main__":
    main()
