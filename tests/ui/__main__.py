"""Takes the pictures of the documentation: python -m tests.ui. The models are headers of full size without their data."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from tests.kit.adapters import kohya
from tests.kit.browser import Window, window
from tests.kit.files import save
from tests.kit.hollow import hollow
from tests.kit.models import sd1
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


def reported(w: Window) -> None:
    """Merge, and open the report with its pictures."""
    w.open()
    w.choose("#fields .field select", "base")
    w.choose("fieldset select", "ink")
    w.until("$('#plan').dataset.state === 'ready'")
    w.js("$('#run').click()")
    w.until("$('#runs > li')?.dataset.state === 'done'")
    w.js("$('#runs details:last-of-type').open = true")
    w.driver.switch_to.frame(w.until("$('#runs iframe')"))
    w.until("document.documentElement.dataset.ready")
    w.js("[...document.querySelectorAll('h2')].find((h) => h.textContent.startsWith('What changed')).scrollIntoView()")
    w.driver.switch_to.default_content()
    time.sleep(2)
    w.js("$('#queue').scrollIntoView()")


def main() -> None:
    """Take the form in light, and a report in dark."""
    with TemporaryDirectory() as home:
        folder = Path(home) / "ComfyUI"
        models(folder)
        with serving(folder) as page, window(page.address, *SIZE) as w:
            page.measured()
            fill(w)
            w.js(PLAIN, home)
            w.driver.save_screenshot(str(PICTURES / "ui-light.png"))
    with TemporaryDirectory() as home:
        for kind, name, tensors in (("checkpoints", "base", sd1()), ("loras", "ink", kohya(sd1()))):
            path = Path(home) / "ComfyUI/models" / kind
            path.mkdir(parents=True)
            save(tensors, path / f"{name}.safetensors")
        with (
            serving(Path(home) / "ComfyUI", pictures=True) as page,
            window(page.address, *SIZE, dark=True) as w,
        ):
            reported(w)
            w.js(PLAIN, home)
            w.driver.save_screenshot(str(PICTURES / "ui-dark.png"))


if __name__ == "__main__":
    main()
