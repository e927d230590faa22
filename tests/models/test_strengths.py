"""Parts of --strength-for: what people call a network or a stack, and what it is in a base."""

from __future__ import annotations

from pathlib import Path

import pytest

from lora_merge.errors import UsageError
from lora_merge.job import Adapter
from lora_merge.models.names import Names
from lora_merge.models.part_factors import Strengths, on_base
from lora_merge.models.parts import Parts
from lora_merge.safe_regex import Steps
from tests.kit.blocks import SPELLINGS, names_of

BASES = {name: names_of(f"single-file/{name}") for name in ("sd1", "sdxl", "sd3", "flux1-dev-all-in-one")}


def networks(word: str, names: Names) -> list[str]:
    """The networks that a part covers; the word itself if it names none."""
    parts = Parts("--strength-for", (word,), names)
    return [p.label for p in names.parts if parts.names_network(word) and parts.factor(word, "", p.label)] or [word]


@pytest.mark.few(15)
@pytest.mark.parametrize(("base", "word", "found"), [
    *(("sd1", word, ["te"]) for word in ("te", "TE", "te1", "text_encoder", "text_encoder_1", "clip", "clip_l", "lora_te", "lora_te1", "text_model")),
    *(("sd1", word, ["unet"]) for word in ("unet", "UNET", "transformer", "model", "denoiser", "dit", "diffusion_model", "model.diffusion_model", "lora_unet")),
    *(("sd1", word, ["vae"]) for word in ("vae", "first_stage_model", "lora_vae", "autoencoder")),
    *(("sdxl", word, ["te1"]) for word in ("te1", "text_encoder", "clip_l", "lora_te1")),
    *(("sdxl", word, ["te2"]) for word in ("te2", "text_encoder_2", "clip_g", "lora_te2", "CLIP_G")),
    *(("sdxl", word, ["te1", "te2"]) for word in ("te", "clip", "lora_te")),
    ("sd3", "t5xxl", ["te3"]), ("sd3", "text_encoder_3", ["te3"]), ("sd3", "unet", ["transformer"]),
    ("flux1-dev-all-in-one", "t5", ["te2"]), ("flux1-dev-all-in-one", "t5xxl", ["te2"]), ("flux1-dev-all-in-one", "dit", ["transformer"]),
    *(("sd1", word, [word]) for word in ("text_encoder_2", "clip_g", "foo", "prior", "IN04", "re:te", "mid_block")),
    ("flux1-dev-all-in-one", "T5", ["T5"]), ("flux1-dev-all-in-one", "CLIP", ["CLIP"]),  # blocks
])  # fmt: skip
def test_network_has_the_names_that_people_have_for_it(base: str, word: str, found: list[str]) -> None:
    assert networks(word, BASES[base]) == found


def covered(names: Names, part: str) -> set[str]:
    """The tensors whose strength a part changes."""
    one = Strengths(on_base(Adapter(Path("a"), 1.0, ((part, 0.5),)), names), names, Steps())
    components = {key: names.component(key) for key in names.shapes}
    one.check(components)
    return {key for key, of in components.items() if one.factor(key, of) == 0.5}


@pytest.mark.few(4)
@pytest.mark.parametrize(("base", "word", "same"), SPELLINGS)
def test_block_has_the_names_of_other_programs_too(base: str, word: str, same: str) -> None:
    """In either layout; also those of diffusers, in which `inspect` and adapters name the blocks."""
    names = BASES.get(base.rpartition("/")[2]) or names_of(base)
    assert covered(names, word) == covered(names, same) != set()


@pytest.mark.parametrize("base", ["single-file/sd1", "diffusers/sd15"])
def test_last_block_without_its_stack_has_no_output_of_the_model(base: str) -> None:
    """A short name counts the output as the last block; the authors' path of that block does not."""
    names = BASES["sd1"] if base.startswith("single") else names_of(base)
    more = covered(names, "OUT11") - covered(names, "output_blocks.11")
    assert {key.removeprefix("model.diffusion_model.").partition(".")[0] for key in more} <= {
        "out",
        "conv_norm_out",
        "conv_out",
    }
    assert more


@pytest.mark.parametrize(("word", "near"), [
    ("IN44", "did you mean IN04"), ("unte", "did you mean unet"), ("down_blocks.9", "this base has te, unet, vae, and the blocks BASE, IN00"),
    ("te2", "this base has te"), ("re:double_blocks", "the blocks BASE, IN00"),
])  # fmt: skip
def test_part_that_the_base_lacks_is_refused_with_those_that_it_has(word: str, near: str) -> None:
    with pytest.raises(UsageError) as e:
        covered(BASES["sd1"], word)
    assert near in e.value.fix and "lora-merge parts BASE" in e.value.fix


@pytest.mark.parametrize(
    ("base", "word"), [("sd1", "transformer"), ("sdxl", "transformer"), ("sd3", "transformer"), ("sd1", "unet")]
)
def test_name_of_a_network_covers_no_other_network(base: str, word: str) -> None:
    """Text encoders have keys such as cond_stage_model.transformer.text_model: the word is no path there."""
    names = BASES[base]
    assert {names.component(key) for key in covered(names, word)} == {*networks(word, names)}
