"""A tiny base and adapters for it, made once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.kit.adapters import kohya
from tests.kit.files import save
from tests.kit.models import sd1

TRAINED = {
    "ss_network_module": "networks.lora", "ss_sd_model_name": "sd15.safetensors", "ss_steps": "1200", "ss_unet_lr": "1e-4",
    "ss_optimizer": "AdamW8bit", "ss_resolution": "(512, 512)", "modelspec.title": "Ink", "modelspec.trigger_phrase": "ohwx",
    "ss_tag_frequency": json.dumps({"5_ink": {"ink": 7, "cat": 2}, "reg": {"cat": 9}}), "ss_text_encoder_lr": "None",
    "ss_dataset_dirs": json.dumps({"5_ink": {"n_repeats": 5, "img_count": 40}}), "sshs_model_hash": "0" * 64,
    **{f"ss_more_{n}": "x" for n in range(20)},
}  # fmt: skip
"""The metadata of sd-scripts, shortened."""


class Scene(NamedTuple):
    """Files in a folder."""

    folder: Path
    base: Path
    ink: Path
    oil: Path


@pytest.fixture(scope="session")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    """A base in fp16, an adapter with much metadata, another one."""
    folder = tmp_path_factory.mktemp("viewing")
    base, ink, oil = (folder / f"{name}.safetensors" for name in ("base", "ink", "oil"))
    save(sd1(), base)
    save(kohya(sd1()), ink, TRAINED)
    save(kohya(sd1(), seed=300, te=False), oil)
    return Scene(folder, base, ink, oil)
