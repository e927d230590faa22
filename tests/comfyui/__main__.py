"""Takes the picture of the documentation: LORA_MERGE_COMFYUI="PYTHON PATH/main.py" python -m tests.comfyui."""

from __future__ import annotations

import base64
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from tests.kit.adapters import kohya
from tests.kit.browser import wait, window
from tests.kit.comfy import lora, node
from tests.kit.files import save
from tests.kit.live_comfy import installed, running
from tests.kit.models import sd1

PICTURE: Final = Path(__file__).parents[2] / "configs/site/pages/comfyui.png"
SIZE: Final = (1110, 720)
METHOD: Final = {"method": "ties", "method.density": 0.5, "method.elect": "sum", "method.normalise": "count"}
WORKFLOW: Final = {
    "1": lora("ink.safetensors", 0.8),
    "2": lora("detail.safetensors", 0.5, 0.0),
    "3": node("Bake", base="checkpoints/base.safetensors", dtype="keep", unmatched="error", name="ink+detail",
              overwrite=False, **METHOD, **{"adapters.adapter0": ["1", 0], "adapters.adapter1": ["2", 0]}),
}  # fmt: skip
PLACES: Final = {"1": (30, 60, 320, 170), "2": (30, 300, 320, 170), "3": (430, 60, 640, 620)}
"""Node → left, top, width and height."""


ARRANGED: Final = """
for (const [id, [x, y, width, height]] of Object.entries(arguments[0])) {
  const n = window.app.graph.getNodeById(id); n.pos = [x, y]; n.setSize([width, height]);
}
window.app.canvas.ds.reset(); window.app.canvas.setDirty(true, true)
"""


def main() -> None:
    """Run a bake on the page of ComfyUI itself."""
    with TemporaryDirectory(prefix="ComfyUI-") as home:
        folder = Path(home)
        installed(folder)
        save(sd1(), folder / "models/checkpoints/base.safetensors")
        for seed, name in enumerate(("ink", "detail"), 1):
            save(kohya(sd1(), seed=seed), folder / f"models/loras/{name}.safetensors")
        with running(folder) as server, window(server.address, *SIZE, dark=True) as w:
            w.driver.get(server.address)
            w.until("Boolean(window.LiteGraph?.registered_node_types?.LoraMergeBake)", seconds=300)
            time.sleep(3)  # until the page has opened its empty workflow
            w.js("window.app.loadApiJson(arguments[0], 'bake')", WORKFLOW)
            w.until("Boolean(window.app.graph.getNodeById(3))")
            w.js("window.app.queuePrompt(0)")
            wait(lambda: server.get("/history"), "the bake", 300)
            time.sleep(5)  # until its picture is loaded
            w.js(ARRANGED, PLACES)
            time.sleep(2)
            data = w.js("return $('#graph-canvas').toDataURL('image/png').split(',')[1]")
            PICTURE.write_bytes(base64.b64decode(data))


if __name__ == "__main__":
    main()
