"""`inspect` tells of a quantised base the format, the block of a scale, the bits of a number, and what is not quantised."""

from __future__ import annotations

from pathlib import Path

import pytest

from lora_merge.viewing.inspect import inspect
from lora_merge.viewing.text import lines

from .. import gguf_files as by_library
from ..files.quantised_forms import FORMS
from ..files.test_gguf import flux
from ..files.test_quantised_bases import base
from ..support import rand, save

TOLD = {
    "ComfyUI nvfp4": ("nvfp4", [1, 16], 4.8), "ComfyUI fp8 rows": ("fp8_scaled", [1, 192], 8.17),
    "block fp8": ("block fp8", [128, 128], 8.0), "ModelOpt fp8": ("ModelOpt fp8", None, 8.0),
    "compressed-tensors mxfp8": ("compressed-tensors mxfp8", [1, 32], 8.25),
    "compressed-tensors int4": ("compressed-tensors int4", [1, 64], 4.5), "bitsandbytes nf4": ("bitsandbytes nf4", [1, 64], 4.52),
    "mlx 4 bit": ("mlx 4 bit", [1, 64], 4.5), "GPTQ": ("GPTQ", None, 4.51),
}  # fmt: skip


@pytest.mark.parametrize("name", TOLD)
def test_formats_are_told_with_blocks_and_bits(name: str, tmp_path: Path) -> None:
    source, tensors = base(FORMS[name], tmp_path / "base")
    file = source / "model.safetensors" if source.is_dir() else source
    extra = {"model.layers.0.mlp.up_proj.weight": rand(8, 8), "model.layers.1.mlp.up_proj.weight": rand(8, 8)}
    save({**tensors, **extra}, file)
    facts = inspect(source)
    form, block, bits = TOLD[name]
    (told,) = facts["formats"]
    assert (told["format"], told["weights"], told.get("block")) == (form, 3, block)
    assert told["bits"] == pytest.approx(bits, abs=0.02)
    assert facts["not_quantised"] == {"model.layers.*.mlp.up_proj.weight": 2}
    assert facts["parameters"] == 3 * 160 * 192 + 8 + 2 * 64, "scales and marks are no parameters"
    text = [*lines(facts)]
    assert any(line.startswith("format") and f"{told['bits']:g} bits a number" in line for line in text)
    assert any(line.startswith("not quantised") and "model.layers.*.mlp.up_proj.weight (2)" in line for line in text)


def test_types_of_gguf_are_told_too_and_plain_models_have_no_formats(tmp_path: Path) -> None:
    facts = inspect(by_library.write(tmp_path / "flux.gguf", "flux", flux("Q4_K")))
    assert facts["formats"] == [{"format": "Q4_K", "weights": 4, "bits": 4.5, "block": [1, 256]}]
    assert facts["not_quantised"] == {"img_in.weight": 1, "final_layer.linear.weight": 1}
    assert "formats" not in inspect(save({"a.weight": rand(8, 8)}, tmp_path / "plain.safetensors"))
