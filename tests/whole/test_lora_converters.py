"""LoRA files of other programs: what diffusers' own converters make of them, merged, is what we make of the files.

Every converter gets an adapter in the words that it converts from, random in every layer; its result is added to a tiny
model, factor by factor. Where a converter is known to be wrong, the table leaves those layers out and says so.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest
import torch

import lora_merge
from tests.kit.architectures import native_of
from tests.kit.diffusers_models import CONFIGS
from tests.kit.tensors import Tensors

diffusers = pytest.importorskip("diffusers")
pipelines = pytest.importorskip("diffusers.loaders.lora_pipeline")
convert_unet_state_dict_to_peft = pytest.importorskip("diffusers.utils").convert_unet_state_dict_to_peft
conversion = pytest.importorskip("diffusers.loaders.lora_conversion_utils")
pytestmark = pytest.mark.filterwarnings("ignore")

RANK, ALPHA = 4, 2.0
Pairs = Mapping[str, tuple[torch.Tensor, torch.Tensor]]  # module → down, up


def dotted(prefix: str, *, alpha: bool = False, down: str = "lora_A", up: str = "lora_B") -> Callable[[Pairs], Tensors]:
    def write(pairs: Pairs) -> Tensors:
        file = {
            f"{prefix}{m}.{side}.weight": t
            for m, pair in pairs.items()
            for side, t in zip((down, up), pair, strict=True)
        }
        return file | ({f"{prefix}{m}.alpha": torch.tensor(ALPHA) for m in pairs} if alpha else {})

    return write


def flat(prefix: str) -> Callable[[Pairs], Tensors]:
    write = dotted(prefix, alpha=True, down="lora_down", up="lora_up")
    return lambda pairs: write({m.replace(".", "_"): pair for m, pair in pairs.items()})


class Case(NamedTuple):
    """One converter."""

    model: str
    mixin: str
    write: Callable[[Pairs], Tensors]
    numbers: Mapping[int, int] = {}  # that the converter knows by heart: those of the small model
    layers: str = ""  # regular expression: which of the modules
    native: bool = True  # whether the file has the authors' names
    more: Mapping[str, Any] = {}  # of the configuration


FLUX = {3072: 16, 12288: 64}
KEPT = "blocks"  # final_layer: diffusers drops its alpha (kohya), or swaps one side of it alone (Flux.2)
CASES: dict[str, Case] = {
    "Flux, kohya": Case("FluxTransformer2DModel", "Flux", flat("lora_unet_"), FLUX, "^(?!final_layer)"),
    "Flux, ComfyUI": Case(
        "FluxTransformer2DModel", "Flux", dotted("diffusion_model.", alpha=True, down="lora_down", up="lora_up"), FLUX, KEPT
    ),
    "Flux, mixture": Case("FluxTransformer2DModel", "Flux", flat("lora_transformer_"), {}, "attn.to_|embedder|^proj_out", native=False),
    "Flux, fal": Case(
        "FluxTransformer2DModel", "Flux", dotted("base_model.model."), FLUX, f"{KEPT}|final_layer.linear",
        more={"num_layers": 19, "num_single_layers": 38},
    ),
    "Flux, diffusers": Case("FluxTransformer2DModel", "Flux", dotted("transformer.", alpha=True), native=False),
    "Flux.2": Case("Flux2Transformer2DModel", "Flux2", dotted("diffusion_model."), {}, KEPT),
    "Flux.2, PEFT": Case("Flux2Transformer2DModel", "Flux2", dotted("base_model.model."), {}, KEPT),
    "Flux.2, kohya": Case("Flux2Transformer2DModel", "Flux2", flat("lora_unet_"), {6144: 32, 18432: 96}, KEPT),
    "Flux.3": Case("Flux3Transformer2DModel", "Flux3", dotted("diffusion_model."), {}, KEPT),
    "Wan": Case("WanTransformer3DModel T2V", "Wan", dotted("diffusion_model."), {}, KEPT),
    "Wan, alpha": Case("WanTransformer3DModel I2V", "Wan", dotted("diffusion_model.", alpha=True), {}, KEPT),
    "Wan, musubi": Case("WanTransformer3DModel I2V", "Wan", flat("lora_unet_"), {}, KEPT),
    "SkyReels": Case("SkyReelsV2Transformer3DModel", "SkyReelsV2", flat("lora_unet_"), {}, KEPT),
    "HunyuanVideo": Case(
        "HunyuanVideoTransformer3DModel", "HunyuanVideo", dotted("transformer."), {3072: 20}, "^(double|single)_blocks"
    ),
    "LTX": Case("LTXVideoTransformer3DModel", "LTXVideo", dotted("diffusion_model."), {}, KEPT),
    "Lumina": Case("Lumina2Transformer2DModel", "Lumina2", dotted("diffusion_model."), {2304: 24, 768: 8}, "layers|refiner"),
    "Z-Image": Case("ZImageTransformer2DModel", "ZImage", dotted("diffusion_model."), {}, "", native=False),
    "Z-Image, kohya": Case("ZImageTransformer2DModel", "ZImage", flat("lora_unet_"), {}, "layers|refiner", native=False),
    "Qwen-Image, kohya": Case("QwenImageTransformer2DModel", "QwenImage", flat("lora_unet_"), {}, "blocks", native=False),
    "Qwen-Image": Case("QwenImageTransformer2DModel", "QwenImage", dotted("diffusion_model.", alpha=True), native=False),
    "HiDream": Case("HiDreamImageTransformer2DModel", "HiDreamImage", dotted("diffusion_model."), {}, "attn", native=False),
    "Krea 2": Case("Krea2Transformer2DModel", "Krea2", dotted("diffusion_model."), {}, ""),
    "ACE-Step": Case("AceStepTransformer1DModel", "AceStep", dotted("base_model.model."), {}, "attn"),
    "SD 1, kohya": Case("UNet2DConditionModel SD1", "StableDiffusion", flat("lora_unet_"), {}, "attentions|resnets", native=False),
}  # fmt: skip


@pytest.mark.few(2)
@pytest.mark.parametrize("name", CASES)
def test_file_merges_as_its_converter_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    model = getattr(diffusers, case.model.split(" ")[0])(**{**CONFIGS[case.model], **case.more})
    base = {k: v.clone() for k, v in model.state_dict().items()}
    shapes = {k: tuple(v.shape) for k, v in base.items()}
    shapes = native_of(shapes) if case.native else shapes
    file = case.write({
        key.removesuffix(".weight"): (torch.randn(RANK, *shape[1:]), torch.randn(shape[0], RANK, *[1] * (len(shape) - 2)))
        for key, shape in shapes.items()
        if key.endswith(".weight") and len(shape) > 1 and re.search(case.layers, key.removesuffix(".weight"))
    })  # fmt: skip
    use_numbers(case.numbers, monkeypatch)
    wanted = converted(case.mixin, file, base)
    merged = lora_merge.merge_state_dict(base, file)
    assert {k for k in base if not torch.equal(merged[k], base[k])} == wanted.keys()
    for key, weight in wanted.items():
        assert torch.allclose(merged[key], weight, rtol=1e-4, atol=1e-4), key


def use_numbers(numbers: Mapping[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let converters know the small model's numbers."""
    source = inspect.getsource(conversion)
    for number, small in numbers.items():
        source = re.sub(rf"\b{number}\b", str(small), source)
    scope = {"__name__": conversion.__name__, "__package__": conversion.__package__}
    exec(source, scope)
    for name in [name for name in vars(pipelines) if name.startswith("_convert") and name in scope]:
        monkeypatch.setattr(pipelines, name, scope[name])


def converted(mixin: str, file: Tensors, base: Tensors) -> Tensors:
    """The weights that the library's loader of these adapters gives: of the changed ones alone."""
    load = getattr(pipelines, f"{mixin}LoraLoaderMixin").lora_state_dict
    alphas = {"return_alphas": True} if "return_alphas" in inspect.getsource(load) else {}
    found = load({k: v.clone() for k, v in file.items()}, **alphas)
    found, scales = (found[0], found[1] or {}) if isinstance(found, tuple) else (found, {})
    if any(".processor." in key for key in found):  # the words of its first versions
        found, scales = (convert_unet_state_dict_to_peft(part) for part in (found, scales))
    weights = {}
    for key, down in found.items():
        if not (m := re.fullmatch(r"(?:transformer\.|unet\.)?(.*)\.(lora_A|lora\.down)\.weight", key)):
            continue
        up = found[key.replace("lora_A", "lora_B").replace("lora.down", "lora.up")]
        stems = (key, key.removesuffix(f".{m[2]}.weight"))  # the words of its first versions keep the side in it
        alpha = next((scales[f"{stem}.alpha"] for stem in stems if f"{stem}.alpha" in scales), down.shape[0])
        weight = base[f"{m[1]}.weight"]
        weights[f"{m[1]}.weight"] = weight + (up.flatten(1) @ down.flatten(1) * (alpha / down.shape[0])).view_as(weight)
    return weights
