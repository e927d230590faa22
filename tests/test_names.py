"""Every name of every dialect lands on exactly the rows it means: `python -m pytest tests/test_names.py`."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from math import prod
from pathlib import Path

import pytest

from lora_merge.algorithms import Shape
from lora_merge.checkpoint import Index, TensorInfo
from lora_merge.names import Names, names
from lora_merge.views import View

HEADERS = Path(__file__).parent / "headers"

PAIRS = (
    # native file              diffusers folder
    ("native/sd15",            "diffusers/sd15"),
    ("native/sd21",            "diffusers/sd21"),
    ("native/sdxl",            "diffusers/sdxl"),
    ("native/sdxl-refiner",    "diffusers/sdxl-refiner"),
    ("native/vae-sd",          "diffusers/vae-sd"),
    ("native/openclip-bigg-text", "transformers/clip-bigg"),
)  # fmt: skip

DIALECTS = ("", "diffusion_model.", "base_model.model.", "lora_unet_", "lycoris_")

BUFFERS = ("pos_embed", "inv_freq", "position_ids")


def header(name: str) -> dict[str, Shape]:
    table = json.loads(gzip.decompress((HEADERS / f"{name}.json.gz").read_bytes()))
    shapes = {key: tuple(shape) for key, shape in table.items()}
    for prefix in {
        "native/openclip-bigg-text": [""],
        "single-file/sdxl": ["conditioner.embedders.1.model."],
    }.get(name, ()):
        complete_openclip(shapes, prefix)
    return shapes


def complete_openclip(shapes: dict[str, Shape], prefix: str) -> None:
    """The table lacks what SDXL never runs: the last block and the head. Released files have them."""
    block = f"{prefix}transformer.resblocks."
    for key in [k for k in shapes if k.startswith(f"{block}30.")]:
        shapes[key.replace(f"{block}30.", f"{block}31.")] = shapes[key]
    shapes |= {
        f"{prefix}ln_final.weight": (1280,),
        f"{prefix}ln_final.bias": (1280,),
        f"{prefix}text_projection": (1280, 1280),
    }


def index(shapes: dict[str, Shape], config: dict[str, object] | None = None) -> Index:
    infos = {k: TensorInfo(k, "BF16", s, Path("base.safetensors"), 0, 0) for k, s in shapes.items()}
    return Index(Path("base.safetensors"), infos, {}, (), config or {})


def modules(shapes: dict[str, Shape]) -> dict[tuple[str, str], Shape]:
    """(module, parameter) → shape, as adapters speak of them."""
    found = {}
    for key, shape in shapes.items():
        module, _, leaf = key.rpartition(".")
        found[(module, leaf) if leaf in ("weight", "bias", "scale") else (key, "weight")] = shape
    return found


def called(dialect: str, module: str) -> str:
    return dialect + (module.replace(".", "_") if dialect.endswith("_") else module)


def covered(views: list[View]) -> dict[str, list[tuple[int, int]]]:
    rows = defaultdict(list)
    for view in views:
        for piece in view.pieces:
            rows[piece.key].append((piece.start, piece.stop))
    return {key: sorted(spans) for key, spans in rows.items()}


def assert_one_to_one(base: dict[str, Shape], other: dict[str, Shape], dialect: str) -> None:
    """All names of `other` are found, have the size they should have, and cover every row of `base` once."""
    found = names(index(base))
    views = {}
    for (module, parameter), shape in modules(other).items():
        view = found.find(called(dialect, module), parameter)
        assert view is not None, f"{module} ({parameter})"
        assert prod(view.shape) == prod(shape) and view.shape[:1] == shape[:1], (
            f"{module}: {view} {shape}"
        )
        views[module, parameter] = view
    rows = covered(list(views.values()))
    for key, shape in base.items():
        at = 0
        for start, stop in rows.get(key, ()):
            assert start == at, f"{key}: rows {at} to {start}"
            at = stop
        assert at == (shape[0] if shape else 1), f"{key}: rows from {at} on are nobody's"


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(("native", "diffusers"), PAIRS)
def test_names_of_the_other_layout_cover_the_base_once(
    native: str, diffusers: str, dialect: str
) -> None:
    if dialect in ("diffusion_model.", "lora_unet_") and ("vae" in native or "text" in native):
        pytest.skip("no denoiser")
    assert_one_to_one(header(native), header(diffusers), dialect)
    assert_one_to_one(header(diffusers), header(native), dialect)


def test_sdxl_single_file_has_every_name_of_its_parts() -> None:
    base = names(index(header("single-file/sdxl")))
    assert (base.architecture, base.layout) == ("Stable Diffusion XL", "native")
    for part, inventory in (("unet.", "diffusers/sdxl"), ("text_encoder.", "transformers/clip-l"),
                            ("text_encoder_2.", "transformers/clip-bigg"),
                            ("lora_te2_", "transformers/clip-bigg"), ("lora_unet_", "native/sdxl")):  # fmt: skip
        for module, parameter in modules(header(inventory)):
            if part != "text_encoder." or (
                "layers.11." not in module and "final" not in module
            ):  # not in the table
                assert base.find(called(part, module), parameter) is not None, module


def test_openclip_rows_and_transposed_projection() -> None:
    base = names(index(header("single-file/sdxl")))
    view = base.find("lora_te2_text_model_encoder_layers_3_self_attn_k_proj")
    assert view is not None
    piece = view.pieces[0]
    assert piece.key == "conditioner.embedders.1.model.transformer.resblocks.3.attn.in_proj_weight"
    assert (piece.start, piece.stop, view.shape) == (1280, 2560, (1280, 1280))
    bias = base.find("text_encoder_2.text_model.encoder.layers.3.self_attn.v_proj", "bias")
    assert bias is not None and (bias.pieces[0].start, bias.pieces[0].stop) == (2560, 3840)
    projection = base.find("text_encoder_2.text_projection")
    assert projection is not None and projection.pieces[0].transposed


def test_unknown_model_with_any_prefix() -> None:
    shapes: dict[str, Shape] = {f"body.blocks.{i}.some_layer.weight": (4, 3) for i in range(12)}
    base: Names = names(index({f"model.diffusion_model.{k}": s for k, s in shapes.items()}))
    others = ("transformer.", "unet.base_model.model.", "base_model.model.transformer.")
    for prefix in (*DIALECTS, *others):
        for key in shapes:
            view = base.find(called(prefix, key.removesuffix(".weight")))
            assert view is not None and view.pieces[0].key == f"model.diffusion_model.{key}"
    assert base.find("body.blocks.12.some_layer") is None
