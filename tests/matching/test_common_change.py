"""Names that match after one common change, fused layers of any model, and names that fit two networks.

Right values are those of plain arithmetic on the layer that the trainer's name means.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch

import lora_merge
from lora_merge.errors import AmbiguousName, FitError, UnmatchedModules
from tests.kit.files import save
from tests.kit.tensors import Tensors, rand

H, R = 24, 4
Spelling = Callable[[str], str]


def flux() -> Tensors:
    base = {"img_in.weight": rand(H, 8), "txt_in.weight": rand(H, 16)}
    for i in range(2):
        for part in ("img_attn", "txt_attn"):
            base |= {
                f"double_blocks.{i}.{part}.{n}.weight": rand(rows, H, seed=i)
                for n, rows in (("qkv", 3 * H), ("proj", H))
            }
        base |= {
            f"single_blocks.{i}.linear1.weight": rand(7 * H, H),
            f"single_blocks.{i}.linear2.weight": rand(H, 5 * H),
        }
    return base


def language_model(prefix: str, seed: int = 0) -> Tensors:
    base = {f"{prefix}embed_tokens.weight": rand(50, H, seed=seed), f"{prefix}norm.weight": rand(H, seed=seed)}
    for i in range(2):
        layer = f"{prefix}layers.{i}"
        base |= {f"{layer}.self_attn.{n}_proj.weight": rand(H, H, seed=seed + i) for n in "qkvo"}
        base |= {
            f"{layer}.mlp.{n}_proj.weight": rand(*s, seed=seed + i)
            for n, s in (("gate", (48, H)), ("up", (48, H)), ("down", (H, 48)))
        }
    return base


def adapter(
    base: Tensors, keys: Iterable[str], spelling: Spelling, ends: str = "lora_{}.weight"
) -> tuple[Tensors, Tensors]:
    """A LoRA for some weights, and those weights after the merge."""
    tensors: Tensors = {}
    merged: Tensors = {}
    for n, key in enumerate(keys):
        down, up = rand(R, base[key].shape[1], seed=n), rand(base[key].shape[0], R, seed=n + 1)
        name = spelling(key.removesuffix(".weight"))
        tensors |= {f"{name}.{ends.format('A')}": down, f"{name}.{ends.format('B')}": up}
        merged[key] = base[key] + up @ down
    return tensors, merged


def expect_merged(base: Tensors, tensors: Tensors, merged: Tensors) -> None:
    result = lora_merge.merge_state_dict(base, tensors)
    torch.testing.assert_close({k: result[k] for k in base}, base | merged)


def flat(name: str) -> str:
    return name.replace(".", "_")


CHANGES: dict[str, tuple[Callable[[], Tensors], Spelling]] = {
    "word before flat names": (flux, lambda k: "Hunyuan_video_I2V_lora_" + flat(k)),
    "word before a known prefix": (flux, lambda k: "style_lora_unet_" + flat(k)),
    "letter too much in a prefix": (flux, lambda k: "lora_unett_" + flat(k)),
    "another separator": (flux, lambda k: "lora___lorahyphen___" + k.replace(".", "___lorahyphen___")),
    "dots for underscores": (flux, lambda k: k.replace("_", ".")),
    "underscore at the end": (flux, lambda k: f"lora_unet_{flat(k)}_"),
    "level that the base lacks": (lambda: language_model("model."), lambda k: f"base_model.model.thinker.{k}"),
    "level that the adapter lacks": (lambda: language_model("thinker.model."), lambda k: "base_model.model." + k.removeprefix("thinker.")),
    "two levels that the adapter lacks": (lambda: language_model("net.llm."), lambda k: k.removeprefix("net.llm.")),
}  # fmt: skip


@pytest.mark.few(4)
@pytest.mark.parametrize(("model", "spelling"), CHANGES.values(), ids=CHANGES)
def test_common_change_gives_every_module_its_place(model: Callable[[], Tensors], spelling: Spelling) -> None:
    base = model() | {"other.thing.weight": rand(3, 3)}
    keys = [k for k in base if "blocks" in k or "proj" in k]
    expect_merged(base, *adapter(base, keys, spelling))


def test_common_change_is_reported(tmp_path: Path) -> None:
    base = flux()
    tensors, _ = adapter(base, [k for k in base if "blocks" in k], lambda k: "mine_" + flat(k))
    plan = lora_merge.plan(save(base, tmp_path / "base.safetensors"), save(tensors, tmp_path / "a.safetensors"))
    assert any("without 'mine_' at the beginning" in note for note in plan.adapters[0].notes)


REFUSED: dict[str, tuple[Callable[[], Tensors], Spelling, str]] = {
    "two models have the names": (lambda: language_model("thinker.model.") | language_model("talker.model.", 9), lambda k: k.partition(".")[2], ""),
    "one layer alone below an unknown level": (lambda: language_model("model."), lambda k: f"thinker.{k}", r"layers\.0"),
    "a text encoder that the base lacks": (flux, lambda k: f"lora_te1_{flat(k)}", ""),
    "other shapes": (lambda: {k: torch.cat((v, v)) for k, v in language_model("model.").items()}, lambda k: f"thinker.{k}", ""),
}  # fmt: skip


@pytest.mark.parametrize(("model", "spelling", "only"), REFUSED.values(), ids=REFUSED)
def test_change_that_leads_to_other_layers_is_refused(
    model: Callable[[], Tensors], spelling: Spelling, only: str, request: pytest.FixtureRequest
) -> None:
    base = model()
    small = base if "shapes" not in request.node.name else language_model("model.")
    keys = [k for k in base if ("blocks" in k or "proj" in k) and re.search(only, k) and not k.startswith("talker")]
    tensors, _ = adapter(small, keys, spelling)
    with pytest.raises(FitError):
        lora_merge.merge_state_dict(base, tensors)


FUSED = {"to_qkv": ("to_q", "to_k", "to_v"), "to_kv": ("to_k", "to_v"), "to_added_qkv": ("add_q_proj", "add_k_proj", "add_v_proj")}  # fmt: skip


@pytest.mark.parametrize(
    "spelling", [lambda k: f"transformer.{k}", lambda k: f"lora_transformer_{flat(k)}"], ids=["dotted", "flat"]
)
@pytest.mark.parametrize("fused", FUSED)
def test_fused_projection_is_the_rows_of_its_layers(fused: str, spelling: Spelling) -> None:
    """diffusers' fuse_projections puts q, k and v below each other; grouped heads make k and v narrower."""
    heights = {n: H if "q" in n else H // 2 for n in FUSED[fused]}
    base = {f"blocks.{i}.attn.{n}.weight": rand(rows, H, seed=i) for i in range(2) for n, rows in heights.items()}
    base |= {f"blocks.{i}.attn.{n}.bias": rand(rows, seed=i) for i in range(2) for n, rows in heights.items()}
    tensors: Tensors = {}
    merged: Tensors = {}
    for i in range(2):
        down, up = rand(R, H, seed=i), rand(sum(heights.values()), R, seed=i)
        name = spelling(f"blocks.{i}.attn.{fused}")
        tensors |= {f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}
        changes = (up @ down).split([*heights.values()])
        merged |= {
            k: base[k] + c for n, c in zip(heights, changes, strict=True) if (k := f"blocks.{i}.attn.{n}.weight")
        }
    expect_merged(base, tensors, merged)


def test_name_that_several_networks_have_is_refused() -> None:
    """Two halves with equal names inside: only a prefix says which one is meant."""
    base = language_model("text_encoders.m.model.") | language_model("model.diffusion_model.model.", 5)
    keys = [k for k in base if k.startswith("model.diffusion_model.") and "proj" in k]
    tensors, merged = adapter(base, keys, lambda k: k.removeprefix("model."))
    expect_merged(base, tensors, merged)
    with pytest.raises(AmbiguousName, match="two places"):
        lora_merge.merge_state_dict(base, adapter(base, keys, lambda k: k.removeprefix("model.diffusion_model."))[0])


@pytest.mark.parametrize("spelling", [str, lambda k: k.replace(".", "_")], ids=["dotted", "flat"])
@pytest.mark.parametrize("head", ["bert", "deberta", "xlm_roberta", "clip_text_model"])
def test_first_level_of_another_kind_of_model_is_no_change(head: str, spelling: Spelling) -> None:
    """BERT's names fit another encoder by name and shape; an unknown word at the same place is a change."""
    base = {f"encoder.layer.{i}.attention.self.query.weight": rand(H, H, seed=i) for i in range(2)}
    with pytest.raises(UnmatchedModules):
        lora_merge.merge_state_dict(base, adapter(base, [*base], lambda k: spelling(f"{head}.{k}"))[0])
    expect_merged(base, *adapter(base, [*base], lambda k: spelling(f"trunk.{k}")))


def test_prefix_of_a_network_does_not_choose_between_twins() -> None:
    """YuE2 has `self_attn` and `nar_self_attn` in one layer; `diffusion_model.` means the second, which no name says."""
    base = language_model("model.")
    base |= {
        k.replace("self_attn", "nar_self_attn"): rand(*v.shape, seed=3) for k, v in base.items() if "self_attn" in k
    }
    keys = [k for k in base if ".self_attn.o" in k]
    expect_merged(base, *adapter(base, keys, str))
    with pytest.raises(AmbiguousName, match="two places"):
        lora_merge.merge_state_dict(base, adapter(base, keys, lambda k: f"diffusion_model.{k}")[0])


def map_of(error: FitError, folder: Path) -> Path:
    """The file that the fix of an error has the user write."""
    row = re.search("`(spellings: .*)` to names.yaml", error.fix)
    assert row is not None
    (folder / "names.yaml").write_text(row[1])
    return folder / "names.yaml"


def test_error_of_an_unmatched_adapter_has_a_map_that_matches(tmp_path: Path) -> None:
    base = {f"trunk.{i}.mixer.wq.weight": rand(H, H, seed=i) for i in range(3)} | {"head.weight": rand(7, H)}
    for spelling in (
        lambda k: k.replace("mixer.wq", "attn.query"),
        lambda k: "lora_unet_" + flat(k.replace("mixer.wq", "attn.query")),
    ):
        tensors, merged = adapter(base, [k for k in base if "wq" in k], spelling)
        model, file = save(base, tmp_path / "base.safetensors"), save(tensors, tmp_path / "a.safetensors")
        with pytest.raises(UnmatchedModules, match=r"nearest of \[24, 24\] is trunk\.0\.mixer\.wq") as error:
            lora_merge.plan(model, file)
        result = lora_merge.merge_state_dict(base, tensors, map=map_of(error.value, tmp_path))
        torch.testing.assert_close({k: result[k] for k in base}, base | merged)


def test_map_of_an_error_has_a_row_for_every_pattern(tmp_path: Path) -> None:
    base = language_model("model.")
    keys = [k for k in base if "attn" in k]
    tensors, merged = adapter(base, keys, lambda k: k.replace("self_attn", "attention"))
    with pytest.raises(UnmatchedModules) as error:
        lora_merge.merge_state_dict(base, tensors)
    result = lora_merge.merge_state_dict(base, tensors, map=map_of(error.value, tmp_path))
    torch.testing.assert_close({k: result[k] for k in base}, base | merged)


def test_error_of_an_unmatched_adapter_names_the_shape_that_the_base_lacks() -> None:
    base = {"trunk.0.wq.weight": rand(H, H)}
    tensors = {"x.q.lora_A.weight": rand(R, H), "x.q.lora_B.weight": rand(H + 1, R)}
    with pytest.raises(UnmatchedModules, match=r"no weight is \[25, 24\] as x\.q needs it"):
        lora_merge.merge_state_dict(base, tensors)


def test_text_encoder_that_a_file_lacks_is_in_a_larger_checkpoint_of_the_same_model() -> None:
    """The file may be a part of the base that the adapter was trained on."""
    base = language_model("model.")
    tensors, _ = adapter(
        base, [k for k in base if "q_proj" in k], lambda k: "lora_te_" + flat(k.replace("model.", "encoder."))
    )
    with pytest.raises(
        UnmatchedModules, match="for the text encoder, the base is a single network without one"
    ) as error:
        lora_merge.merge_state_dict({k: v for k, v in flux().items() if "img_in" in k}, tensors)
    assert error.value.fix == "use a checkpoint or folder that contains the text encoder, too"


def test_unknown_base_is_not_said_to_be_the_wrong_one_where_all_shapes_are_in_it(tmp_path: Path) -> None:
    """The words of Flux in the adapter, and its layers in the base by other words: they are the same model."""
    known = flux()
    keys = [key for key in known if "_blocks" in key]
    base = {key.replace("blocks.", "stack.").replace("attn", "mixing"): value for key, value in known.items()}
    tensors, merged = adapter(known, keys, lambda key: f"diffusion_model.{key}")
    with pytest.raises(UnmatchedModules) as error:
        lora_merge.merge_state_dict(base, tensors)
    assert "looks made for" not in str(error.value) and "trained on" not in str(error.value)
    result = lora_merge.merge_state_dict(base, tensors, map=map_of(error.value, tmp_path))
    want = {key.replace("blocks.", "stack.").replace("attn", "mixing"): value for key, value in merged.items()}
    torch.testing.assert_close({k: result[k] for k in base}, base | want)
    lacking = {key: value for key, value in base.items() if "linear2" not in key}
    with pytest.raises(UnmatchedModules, match=r"looks made for .*Flux.1, the base is a model unknown to lora-merge"):
        lora_merge.merge_state_dict(lacking, tensors)
    control = {f"control_model.{key}": value for key, value in lacking.items()}
    with pytest.raises(UnmatchedModules, match=r"looks made for .*Flux.1, the base is a ControlNet"):
        lora_merge.merge_state_dict(control, tensors)
    of_encoder = {f"lora_te_x.lora_{end}.weight": torch.ones(2, 2) for end in ("up", "down")}
    with pytest.raises(UnmatchedModules, match="the base is a ControlNet") as error:
        lora_merge.merge_state_dict(control, of_encoder)
    assert error.value.fix.startswith("use the base the adapter was trained on")


@pytest.mark.parametrize("text", ["spellings: {a.{i}.q: b.{j}.q}", "spellings: {a.{i}.{i}: b.{i}.q}", "spellings: [a]"])
def test_map_of_names_with_a_mistake_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "names.yaml").write_text(text)
    with pytest.raises(lora_merge.MergeError, match=r"names\.yaml, line 1"):
        lora_merge.merge_state_dict({"b.0.q.weight": rand(4, 4)}, {"a.0.q.lora_A.weight": rand(1, 4), "a.0.q.lora_B.weight": rand(4, 1)}, map=tmp_path / "names.yaml")  # fmt: skip


def test_error_without_a_row_for_all_modules_says_what_is_true_for_any_base(tmp_path: Path) -> None:
    """The numbers of the names differ, so no pattern fits; the row of one name does, and the base may be another one."""
    base = {f"core.{n}.mix.weight": rand(H, H, seed=i) for i, n in enumerate(("one", "two"))}
    tensors, _ = adapter(base, base, lambda name: name)
    renamed = {key.replace("core.one", "net.0").replace("core.two", "net.1"): value for key, value in tensors.items()}
    with pytest.raises(FitError) as error:
        lora_merge.merge_state_dict(base, renamed)
    assert ", with a row for every such name, else write the right names, or use a base" in error.value.fix
    rows = map_of(error.value, tmp_path)
    with pytest.raises(UnmatchedModules, match="1 of 2"):
        lora_merge.merge_state_dict(base, renamed, map=rows)
