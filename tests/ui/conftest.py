"""A folder of ComfyUI with small models, for every test anew."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.adapters import kohya
from tests.kit.files import save
from tests.kit.models import sd1, sd3

TRIGGER = {"modelspec.trigger_phrase": "ohwx <b>"}


@pytest.fixture
def comfy(tmp_path: Path) -> Path:
    """A folder with two bases and two adapters; names have spaces, quotes and braces."""
    folder = tmp_path / "ComfyUI"
    for kind in ("checkpoints", "loras"):
        (folder / "models" / kind).mkdir(parents=True)
    base = sd1()
    save(base, folder / "models/checkpoints/tiny.safetensors")
    save(sd3(), folder / "models/checkpoints/sd3.safetensors")
    save(
        {k: v * 1.5 if ".attn1." in k else v for k, v in base.items()}, folder / "models/checkpoints/tuned.safetensors"
    )
    save(kohya(base, seed=1), folder / "models/loras/a {x} it's.safetensors", TRIGGER)
    save(kohya(base, seed=2), folder / "models/loras/b.safetensors")
    return folder
