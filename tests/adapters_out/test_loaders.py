"""Outputs load in the programs that they are for: their loaders, or the keys that these ask for."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import lora_merge
from lora_merge.adapters_out.dialects import DIALECTS
from lora_merge.adapters_out.groups import places
from lora_merge.models.names import names
from tests.kit.architectures import header
from tests.kit.diffusers_models import CONFIGS
from tests.kit.files import index
from tests.kit.layouts import few_blocks
from tests.kit.tensors import Tensors, rand

diffusers = pytest.importorskip("diffusers")
pytestmark = pytest.mark.filterwarnings("ignore")

RANK = 2
QUICK = ("FluxTransformer2DModel", "MochiTransformer3DModel", "ZImageTransformer2DModel")
"""Families of every day's tests; the others take half a minute."""
NO_LOADER = ("PixArt", "HunyuanDiT", "StableAudio", "StableCascade", "LTX2TextConnectors", "Transformer3DModel Animate")
"""Classes without `load_lora_adapter`, and those that are parts of others."""
FAMILIES = [pytest.param(kind, marks=[] if kind in QUICK else [pytest.mark.slow]) for kind in CONFIGS
            if not kind.startswith(NO_LOADER) and hasattr(getattr(diffusers, kind.split(" ")[0], None), "load_lora_adapter")]  # fmt: skip


LAYERS = (torch.nn.Linear, torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)


def trained(model: torch.nn.Module, base: Tensors, to: str) -> Tensors:
    """An adapter in a dialect for every layer of a model; α is half of the rank, and the first has another rank."""
    layers = {f"{name}.weight" for name, layer in model.named_modules() if isinstance(layer, LAYERS)}
    found: Tensors = {}
    known = names(index({k: tuple(v.shape) for k, v in base.items()}))
    dialect = DIALECTS[to]
    for n, place in enumerate(places(known, dialect)):
        shape = place.view.shape
        grouped = len(shape) > 2 and shape[1] == 1  # a rank has to be a multiple of the groups
        if grouped or not {piece.key for piece in place.view.row_slices} <= layers:
            continue
        rank = RANK + (not found)
        found[dialect.key(place.prefix, place.module, dialect.endings["up"])] = rand(
            shape[0], rank, *[1] * (len(shape) - 2), seed=n
        )
        found[dialect.key(place.prefix, place.module, dialect.endings["down"])] = rand(rank, *shape[1:], seed=n + 1)
        found[dialect.key(place.prefix, place.module, ".alpha")] = torch.tensor(rank / 2)
    return found


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", FAMILIES)
def test_diffusers_loads_and_fuses_what_was_converted(kind: str, tmp_path: Path) -> None:
    """From kohya's words: rows are cut and swapped, and the ranks come from the file's own entry."""
    torch.manual_seed(0)
    model: Any = getattr(diffusers, kind.split(" ")[0])(**CONFIGS[kind])
    base = {name: value.clone().contiguous() for name, value in model.state_dict().items()}
    save_file(base, tmp_path / "base.safetensors")
    save_file(trained(model, base, "kohya"), tmp_path / "kohya.safetensors")
    lora_merge.convert(
        tmp_path / "kohya.safetensors",
        tmp_path / "lora.safetensors",
        to="diffusers",
        base=tmp_path / "base.safetensors",
    )
    prefix = "unet" if "UNet" in kind else "transformer"
    model.load_lora_adapter(str(tmp_path), weight_name="lora.safetensors", prefix=prefix, use_safetensors=True)
    model.fuse_lora()
    fused = {name.replace(".base_layer", ""): value for name, value in model.state_dict().items()}
    wanted = lora_merge.merge_state_dict(base, [tmp_path / "kohya.safetensors"])
    assert sum(not torch.equal(wanted[name], base[name]) for name in base) > 5
    for name, value in wanted.items():
        assert torch.allclose(value, fused[name], rtol=0, atol=1e-5), name


@pytest.mark.parametrize("name", ["proj_out", "single_transformer_blocks.0.proj_out"])
def test_peft_adapts_no_other_layer_whose_name_ends_alike(name: str, tmp_path: Path) -> None:
    """Flux has a proj_out of its own, and one in each single block. PEFT warns of keys that a folder lacks."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model: Any = diffusers.FluxTransformer2DModel(**CONFIGS["FluxTransformer2DModel"])
    base = {key: value.clone().contiguous() for key, value in model.state_dict().items()}
    save_file(base, tmp_path / "base.safetensors")
    out, cols = base[f"{name}.weight"].shape
    lora = {f"transformer.{name}.lora_A.weight": rand(2, cols), f"transformer.{name}.lora_B.weight": rand(out, 2)}
    save_file(lora, tmp_path / "lora.safetensors")
    lora_merge.convert(tmp_path / "lora.safetensors", tmp_path / "peft", to="peft", base=tmp_path / "base.safetensors")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        loaded = peft.PeftModel.from_pretrained(model, tmp_path / "peft")
    assert not [str(one.message) for one in told if "missing adapter keys" in str(one.message)]
    assert {key for key, _ in loaded.named_parameters() if "lora_A" in key} == {
        f"base_model.model.{name}.lora_A.default.weight"
    }


NATIVE = {
    "sdxl": "sdxl", "sd3": "sd3", "sd35-medium": "sd35-medium", "sd35-large": "sd35-large", "flux-dev": "flux-dev",
    "chroma": "chroma", "flux2": "flux2", "lumina2": "lumina2", "aura-flow": "auraflow", "wan-i2v-14B": "wan-i2v-14B",
    "hunyuan-video": "hunyuanvideo", "hunyuan-image": "hunyuan-image-2.1", "ltxvideo": "ltxv", "mochi": "mochi",
    "cosmos2-2B": "cosmos2-2B", "stable-audio": "stable-audio",
}  # fmt: skip
"""Model of diffusers → the classes of its authors, ComfyUI, sd-scripts or musubi, whose modules the trainer walks over."""
IN_COMFY = NATIVE | {
    "hunyuan-video": "hunyuanvideo-comfy",
    "zimage": "zimage-fused",
    "qwen-image": "qwen-image",
    "sd15": "sd15",
}
DIFFUSERS = ("sd15", "sd21", "qwen-image", "zimage")
"""Models that sd-scripts and musubi train in diffusers' words."""
ABSENT = re.compile("byt5_in|timestep_features")
"""Layers that the authors' class has and the class of diffusers lacks, or keeps as a buffer."""


def shapes(model: str) -> dict[str, tuple[int, ...]]:
    return header(model) if "sdxl" in model else few_blocks(header(model))  # its levels differ in depth


def matrices(model: str) -> set[str]:
    """The paths of the weights of a class that are matrices."""
    paths = {k.removesuffix(".weight") for k, s in shapes(model).items() if len(s) > 1 and k.endswith(".weight")}
    return {path for path in paths if not ABSENT.search(path)}


def written(model: str, to: str) -> set[str]:
    found = names(index(shapes(model)))
    made = (p for p in places(found, DIALECTS[to]) if len(p.view.shape) > 1 and not p.bare)
    return {DIALECTS[to].key(p.prefix, p.module, "") for p in made}


@pytest.mark.few(4)
@pytest.mark.parametrize("model", [*NATIVE, *DIFFUSERS])
def test_kohyas_names_are_those_that_its_scripts_make_of_the_model(model: str) -> None:
    """networks/lora*.py: the prefix, then the path of the module with underscores for dots."""
    own = f"diffusers/{model}" if model in DIFFUSERS else f"native/{NATIVE[model]}"
    expected = {"lora_unet_" + path.replace(".", "_") for path in matrices(own)}
    assert written(f"diffusers/{model}", "kohya") == expected


@pytest.mark.few(4)
@pytest.mark.parametrize("model", IN_COMFY)
def test_comfyui_finds_every_name(model: str) -> None:
    """comfy/lora.py: the model's own names, dotted or flat; for some models those of diffusers too."""
    native, theirs = matrices(f"native/{IN_COMFY[model]}"), matrices(f"diffusers/{model}")
    assert written(f"diffusers/{model}", "comfy") == {f"diffusion_model.{path}" for path in native}
    if model == "hunyuan-video":  # ComfyUI does not know musubi's names for its modulation
        return
    flat = {"lora_unet_" + path.replace(".", "_") for path in native}
    by_table = {"lora_unet_" + path.replace(".", "_") for path in theirs}
    assert written(f"diffusers/{model}", "kohya") <= flat | by_table


ENCODERS = {  # checkpoint → kohya's prefix, ComfyUI's, and the class of each text encoder
    "sd1": [("lora_te_", "clip_l", "clip-l.text_model")],
    "sdxl": [("lora_te1_", "clip_l", "clip-l.text_model"), ("lora_te2_", "clip_g", "clip-bigg")],
    "sd3": [("lora_te1_", "clip_l", "clip-l.text_model"), ("lora_te2_", "clip_g", "clip-bigg"), ("lora_te3_", "t5xxl", "t5xxl-encoder")],
    "flux1-dev-all-in-one": [("lora_te1_", "clip_l", "clip-l.text_model"), ("lora_te3_", "t5xxl", "t5xxl-encoder")],
}  # fmt: skip


@pytest.mark.parametrize("model", ENCODERS)
def test_text_encoders_have_the_names_that_both_programs_look_for(model: str) -> None:
    found = names(index(header(f"single-file/{model}")))
    for to in ("kohya", "comfy"):
        expected = set()
        for kohya, comfy, kind in ENCODERS[model]:
            paths = {k.removesuffix(".weight") for k, s in header(f"transformers/{kind}").items() if len(s) > 1}
            flat = {kohya + path.replace(".", "_") for path in paths}
            expected |= flat if to == "kohya" else {f"text_encoders.{comfy}.transformer.{path}" for path in paths}
        made = [p for p in places(found, DIALECTS[to]) if p.component.startswith("te") and len(p.view.shape) > 1]
        keys = {DIALECTS[to].key(p.prefix, p.module, "") for p in made if p.module != "text_projection"}
        assert keys <= expected
        assert {k for k in expected if re.search(r"(layers|block)[._]0[._]", k)} <= keys


def test_lycoris_loads_and_merges_what_was_converted(tmp_path: Path) -> None:
    """Its own loader finds each module by its flat name."""
    from lycoris import create_lycoris_from_weights

    kind = "FluxTransformer2DModel"
    torch.manual_seed(0)
    model: Any = diffusers.FluxTransformer2DModel(**CONFIGS[kind])
    base = {name: value.clone().contiguous() for name, value in model.state_dict().items()}
    save_file(base, tmp_path / "base.safetensors")
    save_file(trained(model, base, "kohya"), tmp_path / "kohya.safetensors")
    lora_merge.convert(
        tmp_path / "kohya.safetensors", tmp_path / "l.safetensors", to="lycoris", base=tmp_path / "base.safetensors"
    )
    network, _ = create_lycoris_from_weights(1.0, str(tmp_path / "l.safetensors"), model)
    network.merge_to(1.0)
    wanted = lora_merge.merge_state_dict(base, [tmp_path / "kohya.safetensors"])
    merged = {name.replace("org_module.0.", ""): value for name, value in model.state_dict().items()}
    for name, value in wanted.items():
        assert torch.allclose(value, merged[name], rtol=0, atol=1e-5), name


@pytest.mark.parametrize("options", [{}, {"algorithm": "full"}, {"rank": "energy:1"}])
def test_lycoris_loads_the_norms_of_a_sum(options: dict[str, Any], tmp_path: Path) -> None:
    """Its loader takes the change of a norm under the endings of norms alone."""
    from lycoris import create_lycoris_from_weights

    def model() -> Any:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.LayerNorm(8))

    base = {name: value.clone() for name, value in model().state_dict().items()}
    save_file(base, tmp_path / "base.safetensors")
    own = {"lycoris_1.w_norm": rand(8), "lycoris_1.b_norm": rand(8, seed=1), "lycoris_0.alpha": torch.tensor(1.0),
           "lycoris_0.lora_up.weight": rand(8, 2), "lycoris_0.lora_down.weight": rand(2, 6)}  # fmt: skip
    save_file(own, tmp_path / "a.safetensors")
    out, given = tmp_path / "out.safetensors", [(tmp_path / "a.safetensors", 0.5), (tmp_path / "a.safetensors", -2.0)]
    lora_merge.combine(given, out, base=tmp_path / "base.safetensors", dtype="fp32", **options)
    wanted, loaded = lora_merge.merge_state_dict(base, given), model()
    network, _ = create_lycoris_from_weights(1.0, str(out), loaded)
    network.merge_to(1.0)
    merged = loaded.state_dict()
    assert all(torch.allclose(wanted[name], merged[name], atol=1e-6) for name in ("0.weight", "1.weight", "1.bias"))


def test_biases_that_lycoris_leaves_out_are_reported(tmp_path: Path) -> None:
    base = {"model.a.weight": rand(8, 6), "model.a.bias": rand(8)}
    tuned = {"model.a.weight": rand(8, 6) + rand(8, 1, seed=1) @ rand(1, 6, seed=2), "model.a.bias": rand(8, seed=3)}
    for name, tensors in (("base", base), ("tuned", tuned)):
        save_file(tensors, tmp_path / f"{name}.safetensors")
    paths = [tmp_path / f"{name}.safetensors" for name in ("base", "tuned", "out", "without")]
    told = lora_merge.extract(*paths[:3], rank=1)
    assert any("LyCORIS silently leaves them out" in str(note) for note in told.notes)
    silent = lora_merge.extract(*paths[:2], paths[3], rank=1, others="skip")
    assert not any("LyCORIS" in str(note) for note in silent.notes)
