"""What the commands that write adapters make of an adapter draws the same image in diffusers' own pipelines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import lora_merge
from tests.kit.pipelines import PIPELINES, saved

pytestmark = pytest.mark.filterwarnings("ignore")

POOLED = {"SDXL": 32, "SD3": 8, "Flux": 8}
"""Pipeline → the width of the pooled text that its tiny model expects."""
WRITTEN = {"SD": ("kohya", "back", "sum", "full", "mean"), "SDXL": ("kohya", "back"), "SD3": ("back", "full"),
           "Flux": ("back", "sum")}  # fmt: skip
"""Pipeline → what is drawn with. Diffusers reads kohya's files of Flux by the sizes of the real model."""
NEAR = 1e-4


def image(pipe: Any, name: str) -> torch.Tensor:
    """The image of one step, before the VAE, of the text that the pipeline's own text encoders make of some tokens."""
    pipe.set_progress_bar_config(disable=True)
    tokens = torch.arange(6)[None] % 20
    encoders = [getattr(pipe, part) for part in PIPELINES[name][1] if part.startswith("text_encoder")]
    found = [encoder(tokens) for encoder in encoders]
    text = sum(one.last_hidden_state for one in found)
    pooled = [one.text_embeds if hasattr(one, "text_embeds") else one.pooler_output for one in found]
    given = {} if name == "SD" else {"pooled_prompt_embeds": sum(pooled).repeat(1, POOLED[name] // 8)}
    if name == "SDXL":
        pipe.text_encoder_2.config.projection_dim = POOLED[name]
    with torch.no_grad():
        done = pipe(prompt_embeds=text, num_inference_steps=1, guidance_scale=1.0, output_type="latent", height=16, width=16,
                    generator=torch.Generator().manual_seed(0), **given)  # fmt: skip
    found_image: torch.Tensor = done.images
    return found_image


@pytest.mark.slow
@pytest.mark.parametrize("name", PIPELINES)
def test_adapter_that_was_written_again_draws_the_same_image(name: str, tmp_path: Path) -> None:
    """Through kohya's words and back, half of it twice, found anew at full rank, and as the mean of itself."""
    make, parts = PIPELINES[name]
    _, lora = saved(make, parts, tmp_path, "")
    base, out = tmp_path / "base", {w: tmp_path / f"{w}.safetensors" for w in ("kohya", "back", "sum", "full", "mean")}
    lora_merge.convert(lora, out["kohya"], to="kohya", base=base)
    lora_merge.convert(out["kohya"], out["back"], to="diffusers", base=base)
    lora_merge.combine([(lora, 0.5), (lora, 0.5)], out["sum"])
    lora_merge.resize(lora, out["full"], rank="energy:1")
    lora_merge.average([lora, lora], out["mean"])
    torch.manual_seed(0)
    pipe = make()
    plain = image(pipe, name)
    images = {}
    for what, path in {"given": lora, **{what: out[what] for what in WRITTEN[name]}}.items():
        pipe.load_lora_weights(path)
        images[what] = image(pipe, name)
        pipe.unload_lora_weights()
    assert (images["given"] - plain).abs().max() > 30 * NEAR
    for what, found in images.items():
        assert (found - images["given"]).abs().max() < NEAR, what
