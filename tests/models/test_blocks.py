"""Blocks: the same names for a tensor in every layout of a model, and lists of weights that mean what they say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lora_merge.errors import UsageError
from lora_merge.job import Adapter
from lora_merge.models.blocks import CURVES, PRESETS, SHORT_LISTS, adapter_groups, blocks, groups
from lora_merge.models.components import components
from lora_merge.models.names import Names
from lora_merge.models.part_factors import Strengths
from lora_merge.safe_regex import Steps
from tests.kit.blocks import HEADERS, blocks_of, names_of, shapes_of

ALL = sorted(f"{p.parent.name}/{p.name.removesuffix('.json.gz')}" for p in HEADERS.rglob("*.json.gz"))
TWO_LAYOUTS = ["sd15", "sd21", "sdxl", "sdxl-refiner", "flux-dev", "flux2", "auraflow:aura-flow", "chroma", "sd3", "sd35-large",
               "hunyuanvideo:hunyuan-video", "lumina2", "zimage-original:zimage", "wan-t2v-1.3B", "qwen-image"]  # fmt: skip


@pytest.mark.few(8)
@pytest.mark.parametrize("name", ALL)
def test_every_tensor_is_in_a_block_that_the_order_names(name: str) -> None:
    found = blocks_of(name)
    used = {found.of(key) for key in shapes_of(name)} - {""}
    assert used <= set(found.order)
    assert len(set(found.order)) == len(found.order)
    assert set(found.few) <= set(found.order)


@pytest.mark.few(2)
@pytest.mark.parametrize("pair", TWO_LAYOUTS)
def test_tensor_has_the_same_block_in_the_authors_layout_and_in_that_of_diffusers(pair: str) -> None:
    ours, _, theirs = pair.partition(":")
    native, other = names_of(f"native/{ours}"), names_of(f"diffusers/{theirs or ours}")
    here, there = blocks(native), blocks(other)
    compared = 0
    for key in shapes_of(f"diffusers/{theirs or ours}"):
        module, _, parameter = key.rpartition(".")
        view = native.find(module, parameter)
        if view is not None:
            assert {here.of(piece.key) for piece in view.row_slices} == {there.of(key)}, key
            compared += 1
    assert compared > 100
    assert here.order == there.order


@pytest.mark.parametrize(("name", "count", "few"), [
    ("native/sd15", 26, 17), ("diffusers/sd15", 26, 17), ("single-file/sd1", 26, 17), ("native/sdxl", 20, 12),
    ("diffusers/sdxl", 20, 12), ("single-file/sdxl", 20, 12), ("native/flux-dev", 61, 0), ("diffusers/flux-dev", 61, 0),
    ("single-file/flux1-dev-all-in-one", 61, 0), ("native/flux2", 57, 0), ("transformers/qwen3-8b", 37, 0),
])  # fmt: skip
def test_lists_have_the_lengths_that_are_in_use(name: str, count: int, few: int) -> None:
    found = blocks_of(name)
    assert (len(found.order), len(found.few)) == (count, few)


@pytest.mark.parametrize(("key", "block"), [
    ("conditioner.embedders.0.transformer.text_model.encoder.layers.0.mlp.fc1.weight", "BASE"),
    ("model.diffusion_model.input_blocks.4.1.proj_in.weight", "IN04"),
    ("model.diffusion_model.middle_block.1.proj_in.weight", "M00"),
    ("model.diffusion_model.output_blocks.5.1.proj_in.weight", "OUT05"),
    ("model.diffusion_model.out.2.weight", "OUT08"),
    ("model.diffusion_model.time_embed.0.weight", "BASE"),
    ("model.diffusion_model.label_emb.0.0.weight", "BASE"),
    ("first_stage_model.decoder.conv_in.weight", ""),
])  # fmt: skip
def test_blocks_of_sdxl(key: str, block: str) -> None:
    assert key in shapes_of("single-file/sdxl")
    assert blocks_of("single-file/sdxl").of(key) == block


def test_blocks_of_flux_name_its_ends_and_encoders() -> None:
    found, keys = blocks_of("single-file/flux1-dev-all-in-one"), shapes_of("single-file/flux1-dev-all-in-one")
    of = (
        {found.of(key) for key in keys if key.startswith("text_encoders.clip_l")},
        {found.of(k) for k in keys if "t5xxl" in k},
    )
    assert of == ({"CLIP"}, {"T5"})
    assert found.of("model.diffusion_model.img_in.weight") == "IN"
    assert found.of("model.diffusion_model.final_layer.linear.weight") == "OUT"
    assert found.order[:4] == ("CLIP", "T5", "IN", "D00")
    assert found.chosen("IN") == {"IN"}


@pytest.mark.parametrize(("text", "wanted"), [
    ("IN04", {"IN04"}), ("in4", {"IN04"}), ("IN04-IN06", {"IN04", "IN05", "IN06"}), ("IN04-06", {"IN04", "IN05", "IN06"}), ("MID", {"M00"}), ("IN08-OUT00", {"IN08", "M00", "OUT00"}),
    ("IN04+M00", {"IN04", "M00"}), ("BASE", {"BASE"}), ("OUT", {f"OUT{n:02d}" for n in range(9)}), ("M", {"M00"}),
    ("IN09", set()), ("IN04+IN99", set()), ("X", set()), ("IN06-IN04", set()),
])  # fmt: skip
def test_names_of_blocks(text: str, wanted: set[str]) -> None:
    assert blocks_of("native/sdxl").chosen(text) == wanted


def test_list_has_one_number_for_every_block_or_is_the_short_list() -> None:
    found = blocks_of("native/sd15")
    full = found.weights(",".join(str(n) for n in range(26)), "x")
    assert full == dict(zip(found.order, range(26), strict=True))
    short = found.weights(",".join(str(n + 1) for n in range(17)), "x")
    assert {k: v for k, v in short.items() if v} == dict(zip(SHORT_LISTS[12], range(1, 18), strict=True))
    assert short["IN00"] == 0


@pytest.mark.parametrize("text", ["1,0", ",".join("1" * 61), "1,x", "", "GRAD", "1" * 5000, "ALL1.2.3", "ALL."])
def test_list_that_does_not_fit_is_refused_with_the_order_that_would(text: str) -> None:
    with pytest.raises(UsageError) as e:
        blocks_of("native/sdxl").weights(text, "--strength-for lbw")
    if near := {"GRAD": "GRAD_V or GRAD_A", "ALL.": "ALL"}.get(text):
        assert e.value.fix == f"did you mean {near}?"
    else:
        assert "IN04" in e.value.fix or "INALL" in e.value.fix


@pytest.mark.parametrize("number", ["nan", "inf", "-inf", "1e999", "1_0"])
def test_number_of_a_list_is_one_that_a_strength_may_be(number: str) -> None:
    for text in (",".join([number] * 26), ",".join(["1"] * 25 + [number])):
        with pytest.raises(UsageError):
            blocks_of("native/sd15").weights(text, "--strength-for lbw")


@pytest.mark.few(4)
@pytest.mark.parametrize("preset", PRESETS)
def test_presets_fit_every_unet(preset: str) -> None:
    for name in ("native/sd15", "diffusers/sdxl", "native/sdxl-refiner"):
        found = blocks_of(name)
        weights = found.weights(preset, "x")
        assert set(weights) == set(found.order)
        assert set(weights.values()) <= {0.0, 1.0}
        assert preset == "NONE" or weights["BASE"] == 1
    assert blocks_of("native/sd15").weights("ALL0.5", "x")["IN05"] == 0.5


def test_presets_by_block_are_refused_where_there_are_no_such_blocks() -> None:
    with pytest.raises(UsageError, match="U-Nets"):
        blocks_of("native/flux-dev").weights("MIDD", "x")
    assert set(blocks_of("native/flux-dev").weights("ALL", "x").values()) == {1.0}


@pytest.mark.parametrize("name", ["diffusers/flux-dev", "native/flux-dev", "diffusers/hunyuan-video", "diffusers/sd15"])
def test_order_of_blocks_does_not_depend_on_the_order_of_the_file(name: str) -> None:
    shapes = {key: shape for key, shape in sorted(shapes_of(name).items())}
    turned = dict(reversed(shapes.items()))
    forwards, backwards = (blocks(Names(components(s, {}, (), None), s)) for s in (shapes, turned))
    assert forwards.order == backwards.order == blocks_of(name).order
    assert all(forwards.of(key) == backwards.of(key) for key in shapes)


@pytest.mark.slow
def test_base_that_was_saved_wrapped_has_the_blocks_of_the_base_itself() -> None:
    shapes = shapes_of("native/sd15")
    stored = {key: f"_orig_mod.{key}" for key in shapes}
    wrapped = blocks(Names(components(shapes, {}, (), None), shapes, stored))
    assert {key: wrapped.of(stored[key]) for key in shapes} == {key: blocks_of("native/sd15").of(key) for key in shapes}


@pytest.mark.parametrize("value", ["ALL.", "ALL1.2.3", ",".join(["nan"] * 26), ",".join(["1"] * 25 + ["inf"])])
def test_weights_that_are_no_finite_numbers_are_refused(value: str) -> None:
    with pytest.raises(UsageError, match="neither a list of block weights nor a preset"):
        blocks_of("native/sd15").weights(value, "--strength-for lbw")


def test_base_without_networks_has_no_blocks() -> None:
    assert blocks(Names([], {})).of("model_ema.decay") == ""


CURVED = {
    "GRAD_V": {"BASE": 0, "IN00": 1, "IN06": 0.5, "M00": 0, "OUT11": 1},
    "GRAD_A": {"IN00": 0, "M00": 1, "OUT05": 0.5, "OUT11": 0},
    "FLAT_25": {"BASE": 0, "IN00": 0.25, "OUT11": 0.25},
    "WRAP14": {"IN06": 1, "IN07": 0, "OUT04": 0, "OUT05": 1},
    "MID12_50": {"IN04": 0, "IN05": 0.5, "M00": 0.5, "OUT05": 0.5, "OUT06": 0},
    "OUT12_5": {"IN11": 0, "M00": 0.5, "OUT00": 1},
    "RING08_SOFT": {"IN05": 0.5, "IN06": 1, "IN09": 0.5, "M00": 0, "OUT02": 0.5, "OUT06": 0.5},
    "SMOOTHSTEP": {"IN01": 0.00506365740740741, "M00": 0.5, "OUT08": 0.95703125, "OUT11": 1},
    "SMOOTHSTEP*3": {"IN09": 0.94921875, "OUT02": 0.0507812500000004, "OUT11": 1},
    "R_SMOOTHSTEP/4": {"IN01": 0.925925925925926, "IN06": 0, "OUT11": 1},
    "COSINE": {"IN00": 1, "IN08": 0.75, "OUT11": 0},
    "TRUE_CUBIC_HERMITE": {"IN00": 0, "IN01": 0.199031876929012, "OUT10": 0.842634789737655, "OUT11": 1},
    "FAKE_REVERSE_CUBIC_HERMITE": {"IN01": 0.842423804012346, "M00": 0.5, "OUT11": 0},
}
"""Preset → some of its numbers, as the file of supermerger has them."""


@pytest.mark.few(3)
@pytest.mark.parametrize("preset", CURVED)
def test_presets_of_26_numbers_are_those_of_supermerger_and_for_sd1_alone(preset: str) -> None:
    weights = blocks_of("native/sd15").weights(preset, "x")
    assert {block: weights[block] for block in CURVED[preset]} == pytest.approx(CURVED[preset], abs=1e-9)
    with pytest.raises(UsageError, match="Stable Diffusion 1"):
        blocks_of("diffusers/sdxl").weights(preset, "x")


def test_every_curve_has_a_number_between_0_and_1_for_every_block() -> None:
    for preset in CURVES:
        weights = blocks_of("diffusers/sd15").weights(preset, "x")
        assert weights.pop("BASE") == 0
        assert all(0 <= w <= 1 for w in weights.values()) and any(weights.values())


def test_preset_for_flux_is_for_flux() -> None:
    assert [*blocks_of("native/flux-dev").weights("FLUXALL", "x").values()] == [1.0] * 61
    with pytest.raises(UsageError, match="Flux"):
        blocks_of("native/sd15").weights("FLUXALL", "x")


@pytest.mark.parametrize("layout", ["native/sdxl", "diffusers/sdxl"])
def test_lists_show_weights_in_no_block_and_blocks_that_they_do_not_name(layout: str) -> None:
    """Only of those that the adapter changes, and only of lists: a part that names blocks says itself what it means."""
    names = names_of(layout)
    keys = [key for part in names.parts for key in part.keys.values() if key.endswith("weight")]
    found = blocks(names)
    middle = [key for key in keys if found.of(key) == "M00"]
    loose = [k for k in keys if re.match(r"time_embed|label_emb|add_embedding|out\.\d|conv_out|conv_norm_out", k)]
    full = "lbw:" + ",".join(["1"] * 20)
    short = "lbw:" + ",".join(["1"] * 12)

    def told(part: str, changed: list[str]) -> list[str]:
        found = Strengths(Adapter(Path("a"), 1.0, ((part, 1.0),)), names, Steps())
        return [
            *found.notes([key for key in changed if found.factor(key, names.component(key))])
        ]  # as a merge has them

    assert not told(full, middle) and not told(short, middle) and not told("IN04", keys)
    (note,) = told(full, keys)
    assert f"{len(loose)} weights in no block" in note and "count as BASE" in note and "OUT08" in note
    first = told(short, keys)
    assert first[0].endswith(note.partition(": ")[2]) and "names no IN00, IN01, IN02, IN03" in first[1]


LIKE_THEIR_BASE = ["native/sd15", "diffusers/sdxl", "native/flux-dev", "diffusers/flux-dev", "diffusers/sd3", "native/wan-t2v-1.3B",
                   "diffusers/qwen-image", "native/zimage-original", "diffusers/hunyuan-video", "transformers/qwen3-8b"]  # fmt: skip


@pytest.mark.few(2)
@pytest.mark.parametrize("dialect", ["kohya", "dotted"])
@pytest.mark.parametrize("name", LIKE_THEIR_BASE)
def test_module_of_an_adapter_is_in_the_block_of_its_weight(name: str, dialect: str) -> None:
    """Also if the adapter changes one stack alone, as long as its names are those of one model."""
    lookup = names_of(name)
    bodies = {
        body.removesuffix(".weight"): key for body, key in lookup.parts[0].keys.items() if body.endswith(".weight")
    }
    matrices = {body: key for body, key in bodies.items() if len(lookup.shapes[key]) > 1}
    of_denoiser = lookup.parts[0].label != "model"
    start = "lora_unet_" if dialect == "kohya" else "diffusion_model." if of_denoiser else "base_model.model."
    modules = {start + (b.replace(".", "_") if dialect == "kohya" else b): key for b, key in matrices.items()}
    if not of_denoiser and dialect == "kohya":
        modules = {name.replace("lora_unet_", "lycoris_"): key for name, key in modules.items()}
    of_base, of_adapter = groups(lookup), adapter_groups({m: lookup.shapes[key] for m, key in modules.items()})
    assert {m: of_adapter.block(m) for m in modules} == {m: of_base.block(key) for m, key in modules.items()}
