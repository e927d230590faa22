"""Whole diffusers pipelines: saved, merged by us and by load_lora_weights + fuse_lora, loaded with from_pretrained."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import lora_merge
from lora_merge.errors import FitError
from tests.kit.files import load, load_all, save
from tests.kit.pipelines import PIPELINES, layers, saved, stable_diffusion
from tests.kit.tensors import Tensors

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "variant"), [("SD", ""), ("SDXL", "fp16"), ("SD3", ""), ("Flux", "fp16")])
def test_pipeline_merged_is_the_pipeline_fused(name: str, variant: str, tmp_path: Path) -> None:
    make, parts = PIPELINES[name]
    pipe, lora = saved(make, parts, tmp_path, variant)
    lora_merge.merge(tmp_path / "base", lora, tmp_path / "out")

    torch.manual_seed(0)
    theirs = make()
    theirs.load_lora_weights(lora)
    theirs.fuse_lora(components=list(parts))
    theirs.unload_lora_weights()
    none = {k: None for k, v in theirs.components.items() if v is None}
    ours = type(pipe).from_pretrained(tmp_path / "out", variant=variant or None, **none)
    torch.manual_seed(0)
    base = make()
    for part in (*parts, "vae"):
        got, want, before = (getattr(p, part).state_dict() for p in (ours, theirs, base))
        changed = assert_same(got, want, before, part)
        assert changed == (part != "vae") * len(layers(getattr(base, part)))


def assert_same(got: Tensors, want: Tensors, before: Tensors, part: str) -> int:
    assert set(got) == set(want)
    for key, value in want.items():
        assert torch.allclose(got[key], value, rtol=0, atol=2e-5), f"{part}.{key}"
    return sum(not torch.equal(before[key], value) for key, value in got.items())


def test_single_component_takes_its_own_part(tmp_path: Path) -> None:
    _, lora = saved(*PIPELINES["SD"], tmp_path, "")
    unet, out = tmp_path / "unet.safetensors", tmp_path / "out.safetensors"
    torch.manual_seed(0)
    save(dict(stable_diffusion().unet.state_dict()), unet)
    with pytest.raises(FitError, match="some modules are for the first text encoder, the base contains only the unet"):
        lora_merge.merge(unet, lora, out)
    report = lora_merge.merge(unet, lora, out, unmatched="skip")
    covered = report.coverage[lora.name]
    assert covered["matched"] > 0
    assert all(name.startswith("text_encoder.") for name in covered["skipped"])
    lora_merge.merge(tmp_path / "base", lora, tmp_path / "whole")
    want = load_all(tmp_path / "whole" / "unet")
    assert all(torch.equal(value, want[key]) for key, value in load(out).items())
