"""Both layouts of a model and diffusers' own converter between them: merging and converting may change places.

    native base  --merge-->  merged native
         |  convert               |  convert
    diffusers base  --merge-->  merged, in diffusers' layout

The same adapter, in native or in diffusers' names and in every dialect, is merged into both; every row of the
four corners is compared, so neither our tables nor a converter can be wrong alone. Every module has a random
change of its own.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import lora_merge
from lora_merge.dtypes import Shape
from lora_merge.models.architectures import shipped
from tests.kit.architectures import CONVERTERS, RECORDED, header, native_of, recorded
from tests.kit.layouts import few_blocks
from tests.kit.tensors import Tensors

single_file_utils = pytest.importorskip("diffusers.loaders.single_file_utils")
pytestmark = pytest.mark.filterwarnings("ignore")

RANK, ALPHA = 2, 3.0
Dialect = Callable[[str, torch.Tensor, torch.Tensor], Tensors]
MEASURED = {c.key for a in shipped() for conditions in a.layouts.values() for c in conditions if c.shape}
"""Tensors whose shape tells the model: they keep it."""

PREFIXES = {
    "ldm_unet_checkpoint": "model.diffusion_model.",
    "ldm_vae_checkpoint": "first_stage_model.",
    "open_clip_checkpoint": "x.",
}


def small(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """A narrow model of few blocks."""
    return {k: s if k in MEASURED else tuple(narrow(size) for size in s) for k, s in few_blocks(shapes).items()}


def narrow(size: int) -> int:
    return size // 64 if size >= 256 and size % 64 == 0 else size


def converted(converter: str, arguments: Mapping[str, Any], weights: Tensors) -> Tensors:
    """As diffusers converts it; numbers that a converter knows by heart are those of the small model."""
    source = inspect.getsource(getattr(single_file_utils, f"convert_{converter}"))
    for number in ("num_layers = 48", *re.findall(r"\b(?:3072|12288|2304|768)\b", source)):
        small_one = "num_layers = 2" if "=" in number else str(narrow(int(number)))
        source = re.sub(rf"\b{number}\b", small_one, source)
    scope = dict(vars(single_file_utils))
    exec(source, scope)
    prefix = PREFIXES.get(converter, "")
    given = {prefix + k: v for k, v in weights.items()}
    if converter == "open_clip_checkpoint":
        model = SimpleNamespace(config=SimpleNamespace(hidden_size=narrow(1280)))
        return scope[f"convert_{converter}"](model, given, prefix=prefix)
    return scope[f"convert_{converter}"](given, **arguments)


def filled(shapes: Mapping[str, Shape]) -> Tensors:
    """Random weights."""
    generator = torch.Generator().manual_seed(0)
    return {key: torch.randn(shape, generator=generator) for key, shape in shapes.items()}


def trained(base: Tensors) -> tuple[dict[str, tuple[torch.Tensor, torch.Tensor]], Tensors]:
    """A LoRA on every matrix and convolution, and the weights it makes: W + α/r · up · down."""
    generator = torch.Generator().manual_seed(1)
    lora, merged = {}, dict(base)
    for key, weight in base.items():
        if not key.endswith(".weight") or weight.dim() < 2:
            continue
        down = torch.randn(RANK, *weight.shape[1:], generator=generator)
        up = torch.randn(weight.shape[0], RANK, generator=generator)
        lora[key.removesuffix(".weight")] = up, down
        merged[key] = weight + (ALPHA / RANK * up @ down.flatten(1)).view_as(weight)
    return lora, merged


def dotted(prefix: str) -> Dialect:
    return lambda name, up, down: {
        f"{prefix}{name}.lora_B.weight": up,
        f"{prefix}{name}.lora_A.weight": down * (ALPHA / RANK),
    }


def flat(prefix: str) -> Dialect:
    return lambda name, up, down: {
        f"{prefix}{name.replace('.', '_')}.lora_up.weight": up,
        f"{prefix}{name.replace('.', '_')}.lora_down.weight": down,
        f"{prefix}{name.replace('.', '_')}.alpha": torch.tensor(ALPHA),
    }


DENOISER = (
    *map(flat, ("lora_unet_", "lora_transformer_", "lycoris_")),
    *map(dotted, ("", "diffusion_model.", "transformer.", "base_model.model.", "unet.base_model.model.")),
)
OTHER_DIALECTS = {
    "open_clip_checkpoint": (flat("lora_te_"), dotted("text_encoder."), dotted("base_model.model.")),
    "ldm_vae_checkpoint": (flat("lora_vae_"), dotted("vae."), flat("lycoris_")),
}
"""Of what is no denoiser."""


def written(lora: Mapping[str, tuple[torch.Tensor, torch.Tensor]], write: Dialect) -> Tensors:
    file: Tensors = {}
    for name, (up, down) in lora.items():
        if down.dim() > 2:
            up = up.view(*up.shape, *[1] * (down.dim() - 2))
        file |= write(name, up, down)
    return file


def assert_same(got: Mapping[str, Any], want: Mapping[str, Any]) -> None:
    assert set(got) == set(want)
    for key, value in want.items():
        assert torch.allclose(got[key], value, rtol=0, atol=1e-4), f"{key} {tuple(value.shape)}"


def assert_square(base: Tensors, convert: Callable[[Tensors], Tensors], dialects: Sequence[Dialect]) -> None:
    native_lora, native_merged = trained(base)
    there = convert(base)
    lora, merged = trained(there)
    for dialect in dialects:
        assert_same(convert(lora_merge.merge_state_dict(base, written(lora, dialect))), merged)
        assert_same(lora_merge.merge_state_dict(there, written(native_lora, dialect)), convert(native_merged))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "number", [pytest.param(n, marks=[pytest.mark.slow] * (name == "diffusers/sd15"), id=name.split("/")[1])
               for n, (_, name, *_) in enumerate(CONVERTERS)],
)  # fmt: skip
def test_merge_and_conversion_commute(number: int) -> None:
    native, other, converter, arguments = CONVERTERS[number]
    shapes = header(native) if native else native_of(header(other))
    if converter == "sana_transformer_to_diffusers":  # it insists on these two, which have no counterpart
        shapes |= {"pos_embed": (1, 1024, 2240), "y_embedder.y_embedding": (300, 2304)}
    dialects = OTHER_DIALECTS.get(converter, DENOISER)
    two = [dialects[n % len(dialects)] for n in (2 * number, 2 * number + 1)]
    assert_square(filled(small(shapes)), partial(converted, converter, arguments), two)


@pytest.mark.few(1)
@pytest.mark.parametrize("number", range(len(RECORDED)), ids=RECORDED)
def test_layouts_agree_with_the_conversion_scripts(number: int) -> None:
    native, there = recorded(RECORDED[number])

    def convert(weights: Tensors) -> Tensors:
        return {
            key: torch.cat([weights[source][start:stop] for source, start, stop in rows]).reshape(shape)
            for key, (shape, rows) in there.items()
        }

    two = [DENOISER[n % len(DENOISER)] for n in (2 * number, 2 * number + 1)]
    assert_square(filled({k: v or (1,) for k, v in native.items()}), convert, two)


def test_z_image_omni_has_one_more_refiner() -> None:
    shapes = header("native/zimage-fused")
    omni = {k.replace("context_", "siglip_"): s for k, s in shapes.items() if k.startswith("context_refiner.")}
    convert = partial(converted, "z_image_transformer_checkpoint_to_diffusers", {})
    assert_square(filled(small(shapes | omni)), convert, DENOISER[:1])
